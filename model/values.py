"""Values at the door: what users hand us becomes JSON text here, or is refused with the path to what is wrong.

Everything that is stored of a user's data passes through `encode`, and comes back through `decode` or `decode_as`; ids,
names and keys pass through `check_name` and `key_text`. The text is all that is kept, so that nobody shares a mutable
object with the engine. Nothing here may repair a value silently: what would come back as something else is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NewType, NoReturn

import attrs
import msgspec

from understudy.model.errors import BadValue

Encoded = NewType("Encoded", str)

LIMIT_BYTES = 1_048_576
LIMIT_DEPTH = 100
LIMIT_NAME = 255

_UNNAMEABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def encode(value: object, *, what: str = "value", limit_bytes: int = LIMIT_BYTES) -> Encoded:
    """Give the JSON text of a value; what JSON cannot hold is a `BadValue` that names the path to it."""
    if type(value) not in _LEAVES and _scan(value, LIMIT_DEPTH, limit_bytes) < 0:
        value = _lower(value, _Place(None, what, 0), _Room(limit_bytes))
    try:
        data = _write(value)
    except ValueError:
        _blame(value, _Place(None, what, 0))
    if len(data) > limit_bytes:
        raise BadValue(_too_large(value, what, len(data), limit_bytes))
    return Encoded(data.decode())


def decode(text: str, *, what: str = "value") -> Any:
    """Give the plain JSON value of a text: None, bool, int, float, str, list or dict."""
    try:
        return _read(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"{what}: this text is not JSON ({error}); give what encode() made") from None


def decode_as(text: str, type_: Any, *, what: str = "value") -> object:
    """Give the value of a text as an annotation asks for it: an attrs class, a dataclass, an enum, a list of them."""
    try:
        decoder = _cached_decoder(type_)
    except TypeError:  # The annotation has no hash, as Annotated[..., a_dict] has none.
        decoder = _decoder(type_)
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise BadValue(_unfit(str(error), what, type_)) from error
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadValue(f"{what}: this text is not JSON ({error}); give what encode() made") from None
    except Exception as error:  # A converter or validator of the user's class may raise anything.
        raise BadValue(f"{what}: {_title(type_)} refused it with {error!r}; the value must fit the class") from error


def canonical(text_or_value: object) -> Encoded:
    """Give the one text of a content, its keys sorted. A str is taken as JSON text, anything else is encoded first.

    1 and 1.0 are different contents, since they are different values once they are read back.
    """
    text = text_or_value if isinstance(text_or_value, str) else encode(text_or_value)
    return Encoded(_write_sorted(decode(text)).decode())


def digest(*parts: str) -> str:
    """Give the SHA-256 of several texts, each preceded by its length: ("ab", "c") and ("a", "bc") differ."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.hexdigest()


def check_name(name: object, *, what: str = "name") -> str:
    """Give an id, name or key back as a plain str, if it can be stored, compared and printed on one line."""
    if not isinstance(name, str):
        raise BadValue(f"{what} must be a string, not {_named(type(name))}")
    if not name:
        raise BadValue(f"{what} must not be empty")
    if len(name) > LIMIT_NAME:
        raise BadValue(f"{what} has {len(name):,} characters; at most {LIMIT_NAME} are allowed")
    if not name.isprintable() and (wrong := _UNNAMEABLE.search(name)):
        kind = "lone surrogate" if "\ud800" <= wrong[0] <= "\udfff" else "control character"
        raise BadValue(f"{what} {name!a} holds the {kind} U+{ord(wrong[0]):04X} at {wrong.start()}; remove it")
    return str.__str__(name)


def key_text(value: object, *, what: str = "key") -> str:
    """Give the text of a correlation key, so that 7 in a variable meets "7" in a message."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadValue(f"{what} must be a string or a whole number, not {_named(type(value))}")
    if isinstance(value, str):
        return check_name(value, what=what)
    if value.bit_length() > 4 * LIMIT_NAME:  # Turning a very long number into digits would itself fail.
        raise BadValue(f"{what} is a number of more than {LIMIT_NAME} digits; use a shorter key")
    return check_name(int.__repr__(value), what=what)


# --- the scan: one cheap pass by exact types --------------------------------------------------------------------------

_LEAVES = frozenset({str, int, bool, type(None)})
_write = msgspec.json.Encoder().encode
_write_sorted = msgspec.json.Encoder(order="deterministic").encode
_read = msgspec.json.Decoder().decode


def _scan(value: Any, depth: int, room: int) -> int:
    """Give the room left if msgspec would write this value faithfully as it stands; less than 0 if it must be lowered.

    Strings are not looked at: msgspec itself refuses lone surrogates, and `_blame` finds them then. Each value takes at
    least one byte, so counting them against the limit also ends the walk where few lists contain each other many times.
    """
    kind = type(value)
    if kind is dict:
        room -= len(value)
        for key, item in value.items():
            if type(key) is not str or "\0" in key:
                return -1
            if type(item) not in _LEAVES and (depth <= 1 or (room := _scan(item, depth - 1, room)) < 0):
                return -1
        return room
    if kind is list or kind is tuple:
        room -= len(value)
        for item in value:
            if type(item) not in _LEAVES and (depth <= 1 or (room := _scan(item, depth - 1, room)) < 0):
                return -1
        return room
    if kind is float:
        return room if math.isfinite(value) else -1
    return room if kind in _LEAVES else -1


# --- lowering: everything else becomes plain JSON types, or is refused ------------------------------------------------


class _Place(NamedTuple):
    """Where in a value we are; put into words only when something is wrong there."""

    parent: _Place | None
    part: str | int
    depth: int

    def inside(self, part: str | int) -> _Place:
        return _Place(self, part, self.depth + 1)

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.part)
        if self.depth > _PATH_STEPS:
            return f"{self.parent}" if self.depth > _PATH_STEPS + 1 else f"{self.parent}..."
        return _step(str(self.parent), self.part)


class _Room:
    """How many more values fit below the limit: each takes at least one byte."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.left = limit_bytes

    def take(self, count: int, place: _Place) -> None:
        self.left -= count
        if self.left < 0:
            raise BadValue(
                f"{place}: up to here there are more values than the limit of {self.limit_bytes:,} bytes; {_LARGE}"
            )


_PATH_STEPS = 12
_MINUTE = datetime.timedelta(minutes=1)
_BINARY = (bytes, bytearray, memoryview)
_LARGE = "store large data elsewhere and keep a reference, or raise the limit in the configuration"
_ANNOTATIONS = "JSON types, or an attrs class, dataclass, msgspec Struct, enum, datetime, Decimal or UUID"
_STORABLE = "give JSON types, or an attrs class, dataclass, msgspec Struct or enum made of them"


def _lower(value: object, place: _Place, room: _Room) -> object:
    """Give the plain JSON form of a value, one level after the other."""
    kind: type = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, enum.Enum):
        return _lower(value.value, place, room)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return _lower_float(value, place)
    if isinstance(value, Mapping):
        return _lower_items(value.items(), place, room)
    if isinstance(value, (list, tuple)):
        return _lower_list(value, place, room)
    if isinstance(value, (set, frozenset)):
        return sorted(_lower_list(value, place, room), key=_order)
    if isinstance(value, msgspec.Struct):
        return _lower_struct(value, place, room)
    names = _field_names(kind)
    if names is not None:
        return _lower_items(zip(names, _values(value, names, place), strict=True), place, room)
    return _lower_leaf(value, place)


def _lower_items(items: Iterable[tuple[object, object]], place: _Place, room: _Room) -> dict[str, object]:
    _check_depth(place)
    lowered: dict[str, object] = {}
    for key, item in items:
        name = key if type(key) is str and "\0" not in key else _lower_key(key, place)
        lowered[name] = item if type(item) in _LEAVES else _lower(item, place.inside(name), room)
    room.take(len(lowered), place)
    return lowered


def _lower_list(items: Iterable[object], place: _Place, room: _Room) -> list[object]:
    _check_depth(place)
    lowered: list[object] = []
    for index, item in enumerate(items):
        lowered.append(item if type(item) in _LEAVES else _lower(item, place.inside(index), room))
    room.take(len(lowered), place)
    return lowered


def _lower_key(key: object, place: _Place) -> str:
    if not isinstance(key, str):
        raise BadValue(
            f"{place}: a key is {_named(type(key))}, and JSON keys are strings; use str(key), or a list of pairs"
        )
    if "\0" in key:
        raise BadValue(f"{place}: the key {key!a} holds U+0000; remove it")
    return str.__str__(key)


def _lower_float(value: float, place: _Place) -> float:
    if not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        raise BadValue(f"{place}: {name} is not JSON; use None or a string")
    return float.__float__(value)


def _lower_leaf(value: object, place: _Place) -> object:
    if isinstance(value, _BINARY):
        raise BadValue(f"{place}: {type(value).__name__} is not JSON; decode it to a str, or keep a reference to it")
    if isinstance(value, decimal.Decimal) and not value.is_finite():
        raise BadValue(f"{place}: Decimal {value} is not a number; use None or a string")
    if isinstance(value, (datetime.datetime, datetime.time)) and (value.utcoffset() or _MINUTE) % _MINUTE:
        raise BadValue(f"{place}: its zone is not whole minutes from UTC, and would be rounded; use astimezone(UTC)")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return msgspec.to_builtins(datetime.timedelta(value.days, value.seconds, value.microseconds))
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    raise BadValue(f"{place}: {_named(type(value))} cannot be stored as JSON; {_STORABLE}")


def _lower_struct(value: msgspec.Struct, place: _Place, room: _Room) -> object:
    """Follow the Struct's own configuration (renamed fields, tags, array form), which `decode_as` will expect again."""
    config = value.__struct_config__
    items = _values(value, value.__struct_fields__, place)
    if config.array_like:
        return _lower_list(items if config.tag is None else [config.tag, *items], place, room)
    fields = [pair for pair in zip(value.__struct_encode_fields__, items, strict=True) if pair[1] is not msgspec.UNSET]
    if config.tag is not None:
        fields.insert(0, (str(config.tag_field), config.tag))
    return _lower_items(fields, place, room)


@functools.lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Give the fields of a class that is made of fields.

    msgspec would leave out the private attributes of attrs classes, and would write a set inside an object in the order
    of this process's hash seed; hence fields are read here.
    """
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return None


def _values(value: object, names: tuple[str, ...], place: _Place) -> list[object]:
    try:
        return [getattr(value, name) for name in names]
    except AttributeError as error:
        raise BadValue(f"{place}: a field of {_title(type(value))} has no value ({error}); set every field") from None


def _check_depth(place: _Place) -> None:
    if place.depth >= LIMIT_DEPTH:
        raise BadValue(
            f"{place}: nested deeper than {LIMIT_DEPTH} levels, or within itself; flatten it, or refer to it by id"
        )


def _order(plain: object) -> bytes:
    try:
        return _write_sorted(plain)
    except ValueError:
        return b""  # What cannot be written is refused with its path when the whole value is written.


# --- saying what is wrong, and where ----------------------------------------------------------------------------------


def _blame(plain: object, place: _Place) -> NoReturn:
    """Raise for the first key, string or number of a plain value that msgspec could not write."""
    for found, where in _texts_and_numbers(plain, place):
        try:
            _write(found)
        except UnicodeEncodeError as error:
            surrogate = ord(error.object[error.start])
            raise BadValue(f"{where}: lone surrogate U+{surrogate:04X} is not text; replace or remove it") from None
        except ValueError as error:
            raise BadValue(f"{where}: this integer cannot be written as JSON ({error}); use a string") from None
    raise AssertionError(f"{place} could not be written, but every part of it could")


def _texts_and_numbers(plain: object, place: _Place) -> Iterator[tuple[object, str]]:
    if not isinstance(plain, (dict, list, tuple)):
        yield plain, str(place)
    for part, item in _children(plain):
        if isinstance(part, str):
            yield part, f"{place}: key {part!a}"
        yield from _texts_and_numbers(item, place.inside(part))


def _too_large(plain: object, what: str, size: int, limit_bytes: int) -> str:
    """Name the field to blame: the biggest one, and on within it for as long as one part makes up most of it."""
    path, share = what, size
    while sizes := [(len(_write(item)), part, item) for part, item in _children(plain)]:
        biggest, part, plain = max(sizes, key=lambda sized: sized[0])
        if path != what and biggest <= share // 2:
            break
        path, share = _step(path, part), biggest
    where = "" if path == what else f" (the biggest field is {path} with {share:,})"
    return f"{what}: {size:,} bytes are over the limit of {limit_bytes:,}{where}; {_LARGE}"


def _children(plain: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(plain, dict):
        return plain.items()
    return enumerate(plain) if isinstance(plain, (list, tuple)) else ()


def _step(path: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part}" if part.isidentifier() else f"{path}[{part!a}]"


def _unfit(message: str, what: str, type_: object) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.price`" into our order: path, fault, what was asked for."""
    fault, _, place = message.partition(" - at `")
    path = place.removesuffix("`").replace("$", what, 1) or what
    return f"{path}: {fault}; the value must fit {_title(type_)}"


def _named(kind: type) -> str:
    name = _title(kind)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _title(type_: object) -> str:
    return type_.__name__ if isinstance(type_, type) else str(type_)


# --- decoders ---------------------------------------------------------------------------------------------------------


def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    try:
        return msgspec.json.Decoder(type_, dec_hook=_hook)
    except Exception as error:  # Resolving an annotation runs the user's module; it may raise anything.
        raise BadValue(f"cannot read values as {_title(type_)} ({error}); annotate with {_ANNOTATIONS}") from error


_cached_decoder = functools.lru_cache(maxsize=1024)(_decoder)


def _hook(type_: type, plain: object) -> object:
    if type_ is object:
        return plain
    raise TypeError(f"{_title(type_)} cannot be made from JSON, annotate with {_ANNOTATIONS}")
