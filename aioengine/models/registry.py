"""Which class runs which `ModelConfig.family`."""

from typing import Final

from aioengine.models.llama import LlamaStage

STAGES: Final[dict[str, type[LlamaStage]]] = {"llama": LlamaStage}
