"""A served model whose tokens are bytes."""

from typing import Final

import msgspec
import tokenizers
from support.replicas import MODEL
from tokenizers import decoders, models, pre_tokenizers

from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.template import ChatTemplate
from aioengine.frontend.text import ServedModel
from aioengine.frontend.tokenizer import BYTE_LEVEL_ALPHABET, Tokenizer

BOS_ID: Final = 256
EOS_ID: Final = 257
VOCAB_SIZE: Final = 300
MODEL_NAME: Final = "tiny"
TEMPLATE: Final = (
    "{% if strict %}{{ raise_exception('too strict') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ids(text: str) -> tuple[int, ...]:
    """One token per byte."""
    return tuple(text.encode())


def tiny_tokenizer() -> Tokenizer:
    vocab = dict(BYTE_LEVEL_ALPHABET)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


TOKENIZER: Final = tiny_tokenizer()


def served_model() -> ServedModel:
    config = msgspec.structs.replace(MODEL, name=MODEL_NAME, vocab_size=VOCAB_SIZE)
    return ServedModel(
        name=MODEL_NAME,
        config=config,
        tokenizer=TOKENIZER,
        template=ChatTemplate(TEMPLATE),
        eos_token_ids=(EOS_ID,),
    )


def detokenizer(*stop: str) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TOKENIZER, stop=stop)
