"""The model's files, as far as they can be judged before another rank is met."""

import dataclasses

import msgspec

from aioengine.checkpoint.source import (
    ModelSource,
    read_model_config,
    resolve_model,
    resolve_tokenizer,
)
from aioengine.core.stages import check_fits_model
from aioengine.errors import StartupError
from aioengine.frontend.text import ServedModel, TextPool, load_served_model
from aioengine.model_config import ModelConfig
from aioengine.rank.place import Place
from aioengine.worker.loading import check_checkpoint


def find_model(place: Place) -> tuple[Place, ModelConfig, ModelSource]:
    """The model that `place.config` names, checked; a hub id is pinned in the place returned.

    Blocks: reads headers, may download. Raises ValueError that names the flag or file.
    """
    source = resolve_model(place.config.model, place.startup.left_s)
    if source.hub_id is not None:  # with its commit, so that ranks of different ones are refused
        pinned = msgspec.structs.replace(place.config, model=str(source.hub_id))
        place = dataclasses.replace(place, config=pinned)
    model = read_model_config(source)
    check_fits_model(place.config, model)
    check_checkpoint(source, model)
    return place, model, source


async def load_text(
    place: Place, model: ModelConfig, source: ModelSource, pool: TextPool
) -> ServedModel:
    """The text side of the model, for a front end. Raises StartupError."""
    config = place.config
    try:
        tokenizer = await pool.run(
            resolve_tokenizer, config.tokenizer, source, place.startup.left_s
        )
        return await pool.run(
            load_served_model,
            model,
            tokenizer,
            name=config.served_model_name,
            template_file=config.chat_template,
        )
    except ValueError as error:
        raise StartupError(str(error)) from None
