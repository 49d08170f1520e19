"""What passes the door comes back equal; what would not is refused there, with the path to it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import math
import os
import subprocess
import sys
import types
import uuid
from typing import Annotated, Any, NamedTuple

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.model.errors import BadValue
from understudy.model.values import (
    LIMIT_BYTES,
    LIMIT_DEPTH,
    LIMIT_NAME,
    canonical,
    check_name,
    decode,
    decode_as,
    digest,
    encode,
    key_text,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "yes"


@attrs.frozen
class Line:
    sku: str
    price: float


@attrs.frozen
class Order:
    order_id: str
    items: list[Line] = attrs.field(factory=list)
    _note: str = ""


@dataclasses.dataclass
class Parcel:
    weight: decimal.Decimal
    sent: datetime.datetime | None = None
    labels: frozenset[str] = frozenset()


class Renamed(msgspec.Struct, rename="camel", tag="renamed"):
    first_name: str
    nickname: str | msgspec.UnsetType = msgspec.UNSET


class Row(msgspec.Struct, array_like=True, tag="row"):
    left: int
    right: set[str]


class Pair(NamedTuple):
    left: int
    right: str


class Stranger:
    pass


@given(JSON)
def test_any_json_value_comes_back_equal(value: object) -> None:
    back = decode(encode(value))

    assert back == value
    assert repr(back) == repr(value)  # 1, 1.0 and True are equal; their texts are not.


@given(JSON)
def test_the_same_value_gives_the_same_text_and_keeps_the_order_of_its_keys(value: Any) -> None:
    text = encode(value)

    assert encode(decode(text)) == text


@pytest.mark.parametrize(
    "number", [2**63, 2**64, -(2**63) - 1, 10**4000, -(10**300), 5e-324, 1.7976931348623157e308, -0.0, 1e22]
)
def test_numbers_beyond_machine_words_come_back_exactly(number: float) -> None:
    assert repr(decode(encode(number))) == repr(number)


def test_nul_is_allowed_in_texts_and_never_appears_raw() -> None:
    text = encode({"a": "x\0y"})

    assert "\0" not in text
    assert decode(text) == {"a": "x\0y"}


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Order("7", [Line("a", 1.5)], "private"), Order),
        (
            Parcel(
                decimal.Decimal("1.50"), datetime.datetime(2026, 11, 18, 9, 49, tzinfo=datetime.UTC), frozenset("ab")
            ),
            Parcel,
        ),
        (Renamed("Ada"), Renamed),
        (Renamed("Ada", "A"), Renamed),
        (Row(1, {"x", "y"}), Row),
        (Pair(1, "x"), Pair),
        (Colour.RED, Colour),
        (Level.HIGH, Level),
        ([Word.YES], list[Word]),
        (uuid.UUID(int=7), uuid.UUID),
        ({"a": (1, 2)}, dict[str, tuple[int, int]]),
        (datetime.date(2026, 1, 2), datetime.date),
        (datetime.time(3, 4, 5), datetime.time),
        (None, int | None),
        (3, Annotated[int, {"has": "no hash"}]),
        ({"a": 1}, object),
        ({"a": 1}, Any),
    ],
)
def test_values_come_back_as_their_annotation_asks(value: object, type_: object) -> None:
    assert decode_as(encode(value), type_) == value


@given(
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.timedeltas(),
    st.decimals(allow_nan=False, allow_infinity=False),
)
def test_moments_spans_and_decimals_come_back_equal(
    moment: datetime.datetime, span: datetime.timedelta, amount: decimal.Decimal
) -> None:
    assert decode_as(encode(moment), datetime.datetime) == moment
    assert decode_as(encode(span), datetime.timedelta) == span
    assert decode_as(encode(amount), decimal.Decimal) == amount


@given(st.sets(st.integers() | TEXTS | st.booleans()))
def test_a_set_gives_one_text_however_it_was_filled(elements: set[object]) -> None:
    backward: set[object] = set()
    for element in sorted(elements, key=repr, reverse=True):
        backward.add(element)

    assert encode(elements) == encode(backward)
    assert encode({"in": Parcel(decimal.Decimal(1), None, frozenset("abc"))}).endswith('["a","b","c"]}}')


def test_a_set_gives_one_text_under_every_hash_seed() -> None:
    program = "from understudy.model.values import encode; print(encode({'b', 'a', 'c', 'd', ('e', 1)}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert texts == {b'["a","b","c","d",["e",1]]\n'}


def test_subclasses_and_views_of_plain_types_are_stored_as_what_they_are() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "something else"

    class Moment(datetime.datetime):
        pass

    assert encode([Text("a"), Moment(2026, 1, 2)]) == '["a","2026-01-02T00:00:00"]'
    assert encode(types.MappingProxyType({Word.YES: 1})) == '{"yes":1}'
    assert encode(collections.OrderedDict(b=1, a=2)) == '{"b":1,"a":2}'
    assert encode(collections.Counter("aab")) == '{"a":2,"b":1}'


def test_what_was_given_may_change_afterwards_without_any_effect() -> None:
    given_ = {"items": [1]}
    text = encode(given_)

    given_["items"].append(2)

    assert decode(text) == {"items": [1]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"items": [1, 2, 3, {"price": math.nan}]}, "input.items[3].price: NaN is not JSON; use None or a string"),
        (Order("7", [Line("a", math.inf)]), "input.items[0].price: Infinity is not JSON; use None or a string"),
        (-math.inf, "input: -Infinity is not JSON; use None or a string"),
        ([decimal.Decimal("NaN")], "input[0]: Decimal NaN is not a number; use None or a string"),
        ({"a b": "\ud800"}, "input['a b']: lone surrogate U+D800 is not text; replace or remove it"),
        ({"a": {"x\udfff": 1}}, r"input.a: key 'x\udfff': lone surrogate U+DFFF is not text; replace or remove it"),
        ({"a", "\ud800"}, "input[0]: lone surrogate U+D800 is not text; replace or remove it"),
        ({"a": {1: 2}}, "input.a: a key is an int, and JSON keys are strings; use str(key), or a list of pairs"),
        ({"a": {None: 2}}, "input.a: a key is a NoneType, and JSON keys are strings; use str(key), or a list of pairs"),
        ({"a\0": 2}, r"input: the key 'a\x00' holds U+0000; remove it"),
        ([b"x"], "input[0]: bytes is not JSON; decode it to a str, or keep a reference to it"),
        ({"a": bytearray()}, "input.a: bytearray is not JSON; decode it to a str, or keep a reference to it"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(value: object, message: str) -> None:
    with pytest.raises(BadValue) as refused:
        encode(value, what="input")

    assert str(refused.value) == message


@pytest.mark.parametrize(
    "value", [Stranger(), Stranger, len, 1j, range(3), iter([1]), msgspec.UNSET, msgspec.Raw(b"nan"), Order]
)
def test_an_object_without_a_json_form_is_refused_with_its_type_and_path(value: object) -> None:
    with pytest.raises(
        BadValue, match=rf"^value\.a\[0\]: an? {type(value).__name__} cannot be stored as JSON; give JSON types"
    ):
        encode({"a": [value]})


def test_an_integer_too_long_for_digits_is_refused_with_its_path() -> None:
    with pytest.raises(BadValue, match=r"^value\.a\[0\]: this integer cannot be written as JSON .*; use a string$"):
        encode({"a": [10**5000]})


def test_a_field_that_was_never_set_is_refused() -> None:
    order = object.__new__(Order)

    with pytest.raises(BadValue, match="a field of Order has no value"):
        encode(order)


def test_a_zone_with_odd_seconds_is_refused_instead_of_rounded() -> None:
    odd = datetime.timezone(datetime.timedelta(seconds=61))

    with pytest.raises(BadValue, match=r"value\.at: its zone is not whole minutes"):
        encode({"at": datetime.datetime(2026, 1, 1, tzinfo=odd)})


@given(JSON, st.sampled_from([math.nan, math.inf, "\ud800", b"", {1: 2}, {"\0": 1}, Stranger()]), st.data())
def test_one_bad_part_anywhere_refuses_the_whole(value: object, bad: object, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 5))):
        shape = data.draw(st.sampled_from(["list", "tuple", "dict"]))
        bad = {"list": [value, bad], "tuple": (bad, value), "dict": {"good": value, "bad": bad}}[shape]

    with pytest.raises(BadValue):
        encode(bad)


@pytest.mark.parametrize("innermost", [[], 1.5, "x", ()])
def test_a_hundred_levels_are_allowed_and_no_more(innermost: object) -> None:
    levels = LIMIT_DEPTH - 1 if isinstance(innermost, (list, tuple)) else LIMIT_DEPTH
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"x": value}

    assert encode(decode(encode(value))) == encode(value)
    with pytest.raises(BadValue, match="nested deeper than 100 levels, or within itself"):
        encode([value])


def test_structures_that_contain_themselves_are_refused() -> None:
    ring: list[object] = []
    ring.append({"again": ring})
    order = Order("7")
    order.items.append(order)  # type: ignore[arg-type]

    for value in (ring, order):
        with pytest.raises(BadValue, match="or within itself"):
            encode(value)


def test_few_objects_that_refer_to_each_other_very_often_are_refused_in_finite_time() -> None:
    doubled: list[object] = []
    for _ in range(LIMIT_DEPTH - 1):
        doubled = [doubled, doubled]

    with pytest.raises(BadValue, match="more values than the limit of 10,000 bytes"):
        encode(doubled, limit_bytes=10_000)


def test_the_limit_counts_the_bytes_of_the_text() -> None:
    assert len(encode("x" * (LIMIT_BYTES - 2))) == LIMIT_BYTES
    assert encode("é", limit_bytes=4) == '"é"'
    for value in ("x" * (LIMIT_BYTES - 1), "é" * (LIMIT_BYTES // 2)):
        with pytest.raises(BadValue, match="over the limit of 1,048,576; store large data elsewhere"):
            encode(value)


def test_the_refusal_of_a_large_value_names_its_biggest_field() -> None:
    value = {"id": "7", "scans": [{"page": 1}, {"page": 2, "image": "x" * 90}]}

    with pytest.raises(BadValue) as refused:
        encode(value, what="input", limit_bytes=100)

    assert str(refused.value) == (
        "input: 143 bytes are over the limit of 100 (the biggest field is input.scans[1].image with 92); "
        "store large data elsewhere and keep a reference, or raise the limit in the configuration"
    )


@pytest.mark.parametrize(
    ("text", "type_", "message"),
    [
        ('{"order_id":7}', Order, "value.order_id: Expected `str`, got `int`; the value must fit Order"),
        (
            '{"order_id":"7","items":[{"sku":"a"}]}',
            Order,
            "value.items[0]: Object missing required field `price`; the value must fit Order",
        ),
        ("1.5", int, "value: Expected `int`, got `float`; the value must fit int"),
        ('"7"', int, "value: Expected `int`, got `str`; the value must fit int"),
        ("true", int, "value: Expected `int`, got `bool`; the value must fit int"),
        ('"blue"', Colour, "value: Invalid enum value 'blue'; the value must fit Colour"),
    ],
)
def test_a_value_that_does_not_fit_its_annotation_is_refused_with_path_and_type(
    text: str, type_: object, message: str
) -> None:
    with pytest.raises(BadValue) as refused:
        decode_as(text, type_)

    assert str(refused.value) == message


@pytest.mark.parametrize("type_", [Stranger, list[Stranger], "Unresolved", Order | Line, 3, Stranger | int])
def test_an_annotation_that_json_cannot_fill_is_refused_with_what_to_write_instead(type_: object) -> None:
    with pytest.raises(BadValue, match="annotate with JSON types, or an attrs class, dataclass"):
        decode_as('[{"a":1}]' if type_ == list[Stranger] else '{"a":1}', type_)


def test_a_class_that_refuses_its_fields_is_a_bad_value() -> None:
    @attrs.frozen
    class Positive:
        amount: int

        def __attrs_post_init__(self) -> None:
            if self.amount <= 0:
                raise LookupError("no such amount")

    assert decode_as('{"amount":1}', Positive) == Positive(1)
    with pytest.raises(BadValue, match="Positive refused it with LookupError"):
        decode_as('{"amount":0}', Positive)


@given(st.text())
def test_a_text_is_json_or_a_bad_value(text: str) -> None:
    for read in (decode, lambda text: decode_as(text, Order)):
        with contextlib.suppress(BadValue):
            read(text)


@pytest.mark.parametrize("text", ["", "{", "nan", "[1,]", "1 2", '"\ud800"', r'"\ud800"', "[" * 100_000, "9" * 5000])
def test_broken_texts_are_bad_values(text: str) -> None:
    for read in (decode, lambda text: decode_as(text, list[int])):
        with pytest.raises(BadValue):
            read(text)


@given(st.dictionaries(KEYS, JSON, max_size=4), st.randoms())
def test_content_is_the_same_whatever_the_order_of_its_keys(value: dict[str, object], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)

    assert canonical(dict(items)) == canonical(value) == canonical(encode(value))
    assert decode(canonical(value)) == value


def test_content_is_the_same_whatever_its_spelling() -> None:
    assert canonical('{ "b" : "\\u00e9", "a": [1, {"y":1, "x":2}] }') == '{"a":[1,{"x":2,"y":1}],"b":"é"}'


@given(JSON, JSON)
def test_different_contents_have_different_canonical_texts(one: object, other: object) -> None:
    assert (canonical(encode(one)) == canonical(encode(other))) <= (one == other)


@given(st.lists(st.text()), st.lists(st.text()))
def test_two_lists_of_parts_share_a_digest_only_if_they_are_the_same(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_a_digest_does_not_confuse_where_parts_end() -> None:
    assert (
        len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", ""), digest("2:ab1:c"), digest()}) == 6
    )
    # Stored digests outlive this code: this is sha256 of "1:a2:bc".
    assert digest("a", "bc") == "5310a58788781ab25d5ad7c3f85035824b4eb7bdfa394e0ac2186271472b5492"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=LIMIT_NAME))
def test_a_name_of_any_printable_script_is_given_back(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "id must not be empty"),
        (7, "id must be a string, not an int"),
        (None, "id must be a string, not a NoneType"),
        ("x" * 256, "id has 256 characters; at most 255 are allowed"),
        ("a\0b", r"id 'a\x00b' holds the control character U+0000 at 1; remove it"),
        ("a\n", r"id 'a\n' holds the control character U+000A at 1; remove it"),
        ("a\x85", r"id 'a\x85' holds the control character U+0085 at 1; remove it"),
        ("\ud800", r"id '\ud800' holds the lone surrogate U+D800 at 0; remove it"),
    ],
)
def test_a_name_that_cannot_be_stored_or_printed_is_refused(name: object, message: str) -> None:
    with pytest.raises(BadValue) as refused:
        check_name(name, what="id")

    assert str(refused.value) == message


def test_a_name_comes_back_as_a_plain_string() -> None:
    assert type(check_name(Word.YES)) is str
    assert check_name(Word.YES) == "yes"


@given(st.integers(-(10**254) + 1, 10**254))
def test_a_whole_number_and_its_text_are_the_same_key(number: int) -> None:
    assert key_text(number) == key_text(str(number)) == str(number)


@pytest.mark.parametrize("value", [True, 1.0, None, [1], {"a": 1}, "", 10**255, -(10**254), "a\0"])
def test_what_is_neither_text_nor_whole_number_is_no_key(value: object) -> None:
    with pytest.raises(BadValue, match=r"^key "):
        key_text(value)


def test_a_number_too_long_for_digits_is_no_key() -> None:
    with pytest.raises(BadValue, match="key is a number of more than 255 digits"):
        key_text(10**5000)
