"""Which chat template is served, and what becomes of one that cannot be."""

from pathlib import Path

import pytest
from support.replicas import MODEL

from aioengine.checkpoint.source import ModelSource
from aioengine.frontend.template import TemplateError
from aioengine.frontend.text import load_served_model
from tests.unit.frontend.tiny_vocabularies import byte_level_directory, byte_level_gguf

MESSAGES = [{"role": "user", "content": "hello"}]
BROKEN = "{{ 1 | wordwrap }}"


def rendered(source: ModelSource, template_file: str | None = None) -> str:
    served = load_served_model(MODEL, source, name=None, template_file=template_file)
    return served.template.render(MESSAGES)


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_the_models_own_unless_there_is_a_file(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        source = byte_level_gguf(tmp_path / "t.gguf", "gpt-2", chat_template="own")
    else:
        source = byte_level_directory(tmp_path, {"chat_template": "own"})
    assert rendered(source) == "own"
    file = tmp_path / "other.jinja"
    file.write_text("other {{ messages[0].content }}")
    assert rendered(source, str(file)) == "other hello"


def test_a_model_whose_template_is_broken_still_completes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = byte_level_gguf(tmp_path / "t.gguf", "gpt-2", chat_template=BROKEN)
    with pytest.raises(TemplateError) as raised:
        rendered(source)
    for text in ("this model's own chat template, line 1: ", "'wordwrap'", "--chat-template"):
        assert text in str(raised.value)
    assert "chat requests are refused" in caplog.text


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    source = byte_level_gguf(tmp_path / "t.gguf", "gpt-2", chat_template="own")
    for content in (BROKEN.encode(), b"\xff\xfe\xfd", None):
        file = tmp_path / "file.jinja"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"--chat-template {file}: "):
            rendered(source, str(file))
