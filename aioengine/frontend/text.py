"""Text work off the event loop: tokenizing, templates, file reading."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from aioengine.checkpoint.source import ModelSource
from aioengine.frontend.template import ChatTemplate
from aioengine.frontend.tokenizer import Tokenizer, load_tokenizer
from aioengine.model_config import ModelConfig

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
    template_text = tokenizer.chat_template
    if template_file is not None:
        try:
            with open(template_file, encoding="utf-8") as file:
                template_text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {template_file}: {error}") from None
    eos = dict.fromkeys(config.eos_token_ids)
    if not eos and tokenizer.eos_token_id is not None:
        eos = {tokenizer.eos_token_id: None}
    return ServedModel(
        name=name or config.name,
        config=config,
        tokenizer=tokenizer,
        template=ChatTemplate(template_text),
        eos_token_ids=tuple(eos),
    )


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
