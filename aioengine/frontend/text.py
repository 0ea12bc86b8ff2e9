"""Text work off the event loop: tokenizing, templates, file reading."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from aioengine.checkpoint.source import ModelSource
from aioengine.frontend.template import ChatTemplate, TemplateError
from aioengine.frontend.tokenizer import Tokenizer, load_tokenizer
from aioengine.model_config import ModelConfig

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API needs to know about the model it serves."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_token_ids: tuple[int, ...]


def load_served_model(
    config: ModelConfig,
    source: ModelSource,
    *,
    name: str | None,
    template_file: str | None,
) -> ServedModel:
    """Read tokenizer and chat template. Raises ValueError that names the file or flag."""
    tokenizer = load_tokenizer(source)
    eos = dict.fromkeys(config.eos_token_ids)
    if not eos and tokenizer.eos_token_id is not None:
        eos = {tokenizer.eos_token_id: None}
    return ServedModel(
        name=name or config.name,
        config=config,
        tokenizer=tokenizer,
        template=_template(tokenizer.chat_template, template_file),
        eos_token_ids=tuple(eos),
    )


def _template(of_model: str | None, file_name: str | None) -> ChatTemplate:
    """A model whose own template cannot be used serves /v1/completions nevertheless."""
    if file_name is not None:
        try:
            with open(file_name, encoding="utf-8") as file:
                return ChatTemplate(file.read())
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ValueError(f"--chat-template {file_name}: {error}") from None
    try:
        return ChatTemplate(of_model)
    except TemplateError as error:
        log.warning("the model's own %s; chat requests are refused", error)
        return ChatTemplate(None, f"this model's own {error}")


class TextPool:
    """Two threads for text work. The process ends with `os._exit`, so none delays it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    def close(self) -> None:
        """Work in hand is finished, but nobody waits for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
