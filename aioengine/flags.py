"""Command line and TOML files -> EngineConfig. Flags win over files, files over defaults."""

import argparse
import contextlib
import difflib
import re
import tomllib
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, Literal, NoReturn, get_args, get_origin

import msgspec

from aioengine.config import EngineConfig

GROUPS: Final = {
    "model": "model",
    "parallel": "parallel layout",
    "engine": "engine",
    "limits": "time limits",
    "api": "HTTP API",
    "other": "other",
}
DEFAULTS: Final = EngineConfig()


class CommandParser(argparse.ArgumentParser):
    """Only what was given reaches the namespace; a wrong command line ends with status 1."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **kwargs)

    def error(self, message: str) -> NoReturn:
        hint = "--help lists what there is"
        if match := re.match(r"unrecognized arguments: (-\S+)", message):
            known = [flag for action in self._actions for flag in action.option_strings]
            if close := difflib.get_close_matches(match[1], known, 1):
                hint = f"did you mean {close[0]}? {hint}"
        self.exit(1, f"{self.prog}: error: {message} ({hint})\n")


def build_parser(prog: str, description: str) -> CommandParser:
    """A parser for a command whose only arguments are the settings."""
    parser = CommandParser(prog=prog, description=description)
    add_flags(parser)
    return parser


def add_flags(parser: CommandParser, only: Collection[str] | None = None) -> None:
    """One flag per EngineConfig field (of those in `only`), grouped, plus `--config`.

    `config_from` turns what was given into the configuration.
    """
    fields = [
        field
        for field in msgspec.structs.fields(EngineConfig)
        if only is None or field.name in only
    ]
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        action="append",
        help="Settings by field name; of several files a later one wins, flags on the line win.",
    )
    sections = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for field in fields:
        kind, meta = _unwrap(field.type)
        assert meta.extra is not None
        flag = "--" + field.encode_name.replace("_", "-")
        names = [flag, *meta.extra["aliases"]]
        shown = "" if field.default in (None, False, "", ()) else f" [{_shown(field.default)}]"
        help_text = f"{meta.description}{shown}".replace("%", "%%")
        section = sections[meta.extra["group"]]
        if kind is bool:
            section.add_argument(
                *names, action=argparse.BooleanOptionalAction, dest=field.name, help=help_text
            )
        elif get_origin(kind) is tuple:
            section.add_argument(
                *names,
                action="extend",
                nargs="+",
                dest=field.name,
                metavar=_metavar(str, field.name),
                help=help_text,
            )
        else:
            section.add_argument(
                *names, dest=field.name, metavar=_metavar(kind, field.name), help=help_text
            )


def parse_config(parser: argparse.ArgumentParser, argv: Sequence[str]) -> EngineConfig:
    """Parse flags and the files they name.

    Raises ValueError that names the flag or the TOML key and what was found.
    """
    return config_from(vars(parser.parse_args(argv)))


def config_from(given: dict[str, Any], defaults: EngineConfig = DEFAULTS) -> EngineConfig:
    """Config of parsed flags, as strings and bools by field name; unknown names are not ours.

    `defaults` counts where neither a flag nor a file says anything.
    """
    given = dict(given)
    settings: dict[str, Any] = {}
    for path in given.pop("config", []):
        settings |= _read_toml(path)
    for name, text in given.items():
        if name in EngineConfig.__struct_fields__:
            settings[name] = _convert_flag(name, text)
    return msgspec.structs.replace(defaults, **settings)


def _convert_flag(name: str, text: str | bool | list[str]) -> Any:
    """A list can also be typed as JSON, as for vLLM: `'["a", "b"]'`."""
    if isinstance(text, list) and len(text) == 1 and text[0].startswith("["):
        with contextlib.suppress(msgspec.DecodeError):
            text = msgspec.json.decode(text[0], type=list[str])
    try:
        return msgspec.convert(text, _field_type(name), strict=False)
    except msgspec.ValidationError as error:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag}: {_reason(error)}, got {text!r}") from None


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    settings = {}
    for key, value in table.items():
        if key not in EngineConfig.__struct_fields__:
            raise ValueError(f"--config {path}: unknown setting {key!r}")
        if isinstance(value, str) and get_origin(_unwrap(_field_type(key))[0]) is tuple:
            value = [value]
        try:
            settings[key] = msgspec.convert(value, _field_type(key))
        except msgspec.ValidationError as error:
            raise ValueError(f"--config {path}: {key}: {_reason(error)}, got {value!r}") from None
    return settings


def _field_type(name: str) -> Any:
    return EngineConfig.__annotations__[name]


def _reason(error: msgspec.ValidationError) -> str:
    text = re.sub(r" - at `.*`$", "", str(error)).replace("`", "")
    text = re.sub(r"Invalid enum value .*", "not one of the choices", text)
    text = re.sub(r", got .*$", "", text)
    return text[:1].lower() + text[1:]


def _unwrap(annotation: Any) -> tuple[Any, msgspec.Meta]:
    """The plain type of a field, without Annotated and `| None`, and its Meta."""
    if get_origin(annotation) is not Annotated:
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    kind, meta = get_args(annotation)[:2]
    return kind, meta


def _metavar(kind: Any, name: str) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if kind in (int, float):
        return "N"
    return "auto|N" if kind is not str else name.rsplit("_", 1)[-1].upper()


def _shown(default: Any) -> str:
    if default is True:
        return "on"
    return f"{default:g}" if isinstance(default, float) else str(default)
