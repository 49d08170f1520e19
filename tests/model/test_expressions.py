"""An expression gives what Python would give, or refuses; it never does anything else."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.model.errors import BadExpression
from understudy.model.expressions import (
    FUNCTIONS,
    LIMIT_BITS,
    LIMIT_DEPTH,
    LIMIT_LENGTH,
    LIMIT_NODES,
    LIMIT_SOURCE,
    compile_expression,
    truth,
)
from understudy.model.values import encode

ORDER = {
    "amount": 1500,
    "limit": 1000.5,
    "status": "paid",
    "approved": True,
    "nothing": None,
    "tags": ["new", "gift"],
    "order": {"amount": 7, "items": [{"price": 3}, {"price": 4.5}], "_id": "x", "odd key": 1},
}


def value_of(source: str, variables: Mapping[str, object] = ORDER) -> object:
    return compile_expression(source).evaluate(variables)


def refusal_of(source: str, variables: Mapping[str, object] = ORDER) -> str:
    with pytest.raises(BadExpression) as refused:
        value_of(source, variables)
    return str(refused.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("amount", 1500),
        ("  amount > 1000\n", True),
        ("0 < amount <= 1500 < 2000", True),
        ("0 < amount < 1000 < unset", False),
        ("amount > limit and status == 'paid'", True),
        ("not approved or status != 'paid'", False),
        ("approved and unset_is_not_read if False else 'no'", "no"),
        ("False and unset", False),
        ("True or unset", True),
        ("nothing or 'fallback'", "fallback"),
        ("nothing is None", True),
        ("amount is not None", True),
        ("'gift' in tags", True),
        ("status not in ('new', 'open')", True),
        ("'a' in 'paid'", True),
        ("'amount' in order", True),
        ("tags == ('new', 'gift')", True),
        ("order.amount + 1", 8),
        ("order['odd key']", 1),
        ("order._id", "x"),
        ("order.items[-1].price * 2", 9.0),
        ("status[0]", "p"),
        ("7 // 2 + 7 % 4 - -1", 7),
        ("-amount / 2", -750.0),
        ("status + '!'", "paid!"),
        ("tags + ['x']", ["new", "gift", "x"]),
        ("[amount, {'a': tags[0]}, (), None]", [1500, {"a": "new"}, [], None]),
        ("(amount\n > 1)", True),
        ("(amount\r\n > 1)", True),
        ("len(tags) + len(status) + len(order)", 10),
        ("min(tags) + max('a', 'b')", "giftb"),
        ("min(3, 1, 2) + max([1, 5])", 6),
        ("sum([1, 2.5])", 3.5),
        ("abs(-3) + round(2.5) + round(2.567, 1)", 7.6),
        ("int('12') + int(3.9) + float('0.5')", 15.5),
        ("str(3) + str(1.5) + str(True)", "31.5True"),
        ("bool(tags) and not bool([])", True),
        ("lower('AB') + upper('cd') + strip(' e ')", "abCDe"),
        ("startswith(status, 'pa') and endswith(status, 'id')", True),
        ("contains(tags, 'gift') and contains(status, 'ai')", True),
        ("any([False, amount > 1]) and not all([True, False])", True),
        ("exists(order.items[1].price)", True),
        ("exists(order.items[2].price) or exists(unset) or exists(nothing) or exists(nothing.deeper)", False),
        ("default(unset.deeper, 3) + default(nothing, 4) + default(amount, 5)", 1507),
    ],
)
def test_an_expression_gives_its_value(source: str, expected: object) -> None:
    value = value_of(source)

    assert value == expected
    assert type(value) is type(expected)


def test_variables_come_from_a_mapping_or_from_a_function() -> None:
    expression = compile_expression("amount > 1000")

    assert expression.evaluate(ORDER) is True
    assert expression.evaluate(ORDER.__getitem__) is True


def test_an_expression_knows_its_source_and_the_names_it_needs() -> None:
    expression = compile_expression(" len(order.items) > limit and exists(coupon) and default(rate.x[index], other) ")

    assert expression.source == "len(order.items) > limit and exists(coupon) and default(rate.x[index], other)"
    assert expression.names == {"order", "limit", "coupon", "rate", "index", "other"}
    assert expression.probed == {"coupon", "rate"}
    assert expression == compile_expression(expression.source)
    assert hash(expression) == hash(compile_expression(expression.source))


def test_a_variable_may_have_the_name_of_a_function() -> None:
    assert value_of("max(max, len)", {"max": 3, "len": 4}) == 4
    assert compile_expression("max(max, 3)").names == {"max"}


def test_a_literal_is_new_in_each_evaluation() -> None:
    expression = compile_expression("[1, [2]]")
    first: Any = expression.evaluate({})

    first[1].append(3)

    assert expression.evaluate({}) == [1, [2]]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("amount > unset", "unset is not set"),
        ("status > 3", "status is a string and 3 is a number; `>` cannot be used on them"),
        ("1 in amount", "1 is a number and amount is a number; `in` cannot be used on them"),
        ("1 in status", "1 is a number and status is a string; `in` cannot be used on them"),
        ("[1] in order", "[1] is a list and order is a mapping; `in` cannot be used on them"),
        ("amount + status", "amount is a number and status is a string; `+` cannot be used on them"),
        ("status * 3", "status is a string and 3 is a number; `*` cannot be used on them"),
        ("'%d' % 3", "'%d' is a string and 3 is a number; `%` cannot be used on them"),
        ("-status", "status is a string, and only numbers have a sign"),
        ("amount / (1 - 1)", "division by zero in amount / (1 - 1)"),
        ("amount % 0", "division by zero in amount % 0"),
        ("amount // 0.0", "division by zero in amount // 0.0"),
        ("order.total", "order has no 'total'"),
        ("order['total']", "order has no 'total'"),
        ("order.items[2]", "order.items has no [2]; its length is 2"),
        ("order.items[10 * 10000000000000000000000]", "order.items has no [100000000000000000000000]; its length is 2"),
        ("nothing.total", "nothing is None, so it has no 'total'"),
        ("status.total", "status is a string, which cannot be indexed by a string"),
        ("tags[True]", "tags is a list, which cannot be indexed by a boolean"),
        ("order[0]", "order is a mapping, which cannot be indexed by a number"),
        ("default(status.total, 0)", "status is a string, which cannot be indexed by a string"),
        ("len", "len is not set"),
        ("len(3)", "len cannot work on a number; len(x) gives the length of a string, list or mapping"),
        ("max([])", "max cannot work on a list; max(list) or max(a, b, ...) gives the largest"),
        ("min(1, 'a')", "min cannot work on a number and a string; min(list) or min(a, b, ...) gives the smallest"),
        (
            "int('x')",
            "int cannot work on a string; int(x) gives a number without its fraction, also read from a string",
        ),
        (
            "startswith(status, 3)",
            "startswith cannot work on a string and a number; startswith(text, start) gives whether it starts so",
        ),
    ],
)
def test_what_cannot_be_evaluated_says_why(source: str, reason: str) -> None:
    assert refusal_of(source) == f"cannot evaluate {source!r}: {reason}"


@pytest.mark.parametrize(
    "source",
    [
        "1e308 * 10",
        "1e308 + 1e308",
        "-1e308 - 1e308",
        "float('nan')",
        "float('inf')",
        "int('9' + digits)",
        "sum([1e308, 1e308])",
        "round(5, -1000000000)",
        "round(1.5, 1000000000)",
        "big * big",
        "sum([big, big])",
        "big / 2",
        "float(big)",
        "long + long",
        "list + list",
    ],
)
def test_results_that_are_too_large_or_not_numbers_are_refused(source: str) -> None:
    variables = {
        "big": 2**LIMIT_BITS - 1,
        "digits": "9" * 100_000,
        "long": "x" * (LIMIT_LENGTH // 2 + 1),
        "list": [None] * (LIMIT_LENGTH // 2 + 1),
    }

    assert refusal_of(source, variables)


@pytest.mark.parametrize(
    "source",
    [
        "a ** 2",
        "a << 1",
        "a @ b",
        "~a",
        "lambda: 1",
        "[x for x in a]",
        "{x for x in a}",
        "{x: x for x in a}",
        "any(x for x in a)",
        "a[1:2]",
        "{1, 2}",
        "[*a]",
        "{**a}",
        "{1: 2}",
        "{a: 2}",
        "f'{a}'",
        "f''",
        "b'x'",
        "1j",
        "...",
        "(a := 1)",
        "await a",
        "(yield a)",
        "a = 1",
        "a; b",
        "import os",
        "a is b",
        "a is 1",
        "a.b()",
        "a[0]()",
        "len(a)(b)",
        "print(a)",
        "len()",
        "len(a, b)",
        "len(x=a)",
        "round(1, 2, 3)",
        "exists(1)",
        "exists(len(a))",
        "default(a / 0, 0)",
        "default(a)",
        "__import__('os')",
        "__builtins__",
        "a.__class__",
        "a.__class__.__mro__",
        r"'\ud800'",
        "1e999",
        "0x" + "f" * 1500,
        "9" * 1999,
        "a\n> b",
        "'",
        "(",
        "\0",
        "\ud800",
        "a\ud800",
        "\ufeffa",
    ],
)
def test_what_is_not_in_the_language_is_refused_before_it_can_run(source: str) -> None:
    with pytest.raises(BadExpression) as refused:
        compile_expression(source)

    assert "allowed are names, numbers" in str(refused.value)
    str(refused.value).encode()


def test_a_refusal_points_at_the_place_and_says_what_is_allowed() -> None:
    message = refusal_of("größe > 1 and [x for x in order.items]")

    assert message.splitlines()[:3] == [
        "`[x for x in order.items]` cannot be used here",
        "    größe > 1 and [x for x in order.items]",
        "                  ^",
    ]
    assert message.splitlines()[3].startswith("allowed are names, numbers, strings")
    assert message.endswith("exists, default")


def test_a_refusal_in_a_long_source_shows_its_neighbourhood() -> None:
    shown, caret = refusal_of("amount + " * 30 + "a ** 2").splitlines()[1:3]

    assert len(shown) <= 104
    assert shown[caret.index("^") :].startswith("amount + amount") or "a ** 2" in shown


@pytest.mark.parametrize(
    "source",
    [
        "a" * (LIMIT_SOURCE + 1),
        "-" * LIMIT_DEPTH + "1",
        "not " * LIMIT_DEPTH + "a",
        "(" * 150 + "a" + ")" * 150 + "+1" * LIMIT_DEPTH,
        "a" + ".a" * LIMIT_DEPTH,
        "a" + "[0]" * LIMIT_DEPTH,
        "1+" * 900 + "1",
        "[" * 190 + "]" * 190,
        "lambda:" * 280 + "1",
        "len(" * 100 + "a" + ")" * 100,
        "a or " * (LIMIT_NODES // 2) + "[" + "1," * (LIMIT_NODES // 2) + "]",
        "",
        "  \n",
        None,
        7,
    ],
)
def test_sources_beyond_the_limits_are_refused(source: Any) -> None:
    with pytest.raises(BadExpression):
        compile_expression(source)


def test_sources_within_the_limits_are_accepted() -> None:
    assert value_of("-" * (LIMIT_DEPTH - 2) + "1") == 1
    assert value_of("+".join("1" * (LIMIT_DEPTH - 1))) == LIMIT_DEPTH - 1
    assert value_of("[" + "1," * (LIMIT_NODES - 1) + "]") == [1] * (LIMIT_NODES - 1)


@pytest.mark.parametrize("value", [None, 0, 1, "", "true", [], {"a": 1}, 1.0])
def test_only_true_and_false_are_conditions(value: object) -> None:
    assert truth(True) is True
    assert truth(False) is False
    with pytest.raises(BadExpression, match=r"the condition gives .*; it must give True or False"):
        truth(value)
    with pytest.raises(BadExpression, match="the condition 'x' gives "):
        compile_expression("x").holds({"x": value})


def test_a_condition_holds_or_not() -> None:
    assert compile_expression("amount > 1000").holds(ORDER) is True
    assert compile_expression("amount > 2000").holds(ORDER) is False


def test_errors_of_the_lookup_itself_are_not_hidden() -> None:
    def broken(name: str) -> object:
        raise TypeError(name)

    with pytest.raises(TypeError, match="amount"):
        compile_expression("default(amount, 1) > 1000").evaluate(broken)


def test_every_function_is_documented_by_a_call_that_compiles() -> None:
    for name, function in FUNCTIONS.items():
        for call in function.signature.replace(", ...", "").split(" or "):
            assert call.startswith(f"{name}(")
            compile_expression(call)
        assert function.says


# --- agreement with Python, and totality ------------------------------------------------------------------------------

NUMBERS = st.integers(-1000, 1000) | st.floats(-1e6, 1e6) | st.integers() | st.booleans()
NUMERIC_VARIABLES = st.fixed_dictionaries({"a": NUMBERS, "b": NUMBERS, "c": NUMBERS})


def arithmetic(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = ["+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"]
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(joined), inner),
        st.builds("({} < {} <= {} != {})".format, inner, inner, inner, inner),
        st.builds("({} {})".format, st.sampled_from(["not", "-", "+"]), inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    )


LEAVES = st.sampled_from(["a", "b", "c"]) | NUMBERS.map(repr)


@given(st.recursive(LEAVES, arithmetic, max_leaves=12), NUMERIC_VARIABLES)
def test_arithmetic_and_logic_agree_with_python(source: str, variables: dict[str, object]) -> None:
    expected, failed = python_value(source, variables)

    if failed or is_beyond_limits(expected):
        refusal_of(source, variables)
        return
    try:
        value = value_of(source, variables)
    except BadExpression as refused:
        assert "finite" in str(refused) or "too large" in str(refused)  # noqa: PT017 - An intermediate result may be.
    else:
        assert repr(value) == repr(expected)


def python_value(source: str, variables: dict[str, object]) -> tuple[object, bool]:
    try:
        return eval(source, {"__builtins__": {}}, variables), False
    except (ZeroDivisionError, OverflowError, TypeError):
        return None, True


def is_beyond_limits(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() > LIMIT_BITS
    return isinstance(value, float) and not math.isfinite(value)


TOKENS = [
    *["a", "b", "unset", "1", "0", "2.5", "'x'", "''", "None", "True", "(", ")", "[", "]", "{", "}", ",", ":", "."],
    *[
        "+",
        "-",
        "*",
        "/",
        "//",
        "%",
        "**",
        "<",
        "==",
        "!=",
        "in",
        "not",
        "and",
        "or",
        "if",
        "else",
        "is",
        "for",
        "lambda",
    ],
    *["f'{a}'", "=", ":=", "\n", "#", "\\", "__class__", "é", "'", "@", "~", "!"],
    *FUNCTIONS,
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abx"), inner),
    max_leaves=5,
)


def typed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = ["+", "-", "*", "/", "//", "%", "<", "==", "in", "not in", "and", "or"]
    return st.one_of(
        arithmetic(inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(joined), inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}.{}".format, inner, st.sampled_from("abx")),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'a': {}, 'x': {}}}".format, inner, inner),
        st.builds("{}({})".format, st.sampled_from(sorted(FUNCTIONS)), inner),
        st.builds("{}({}, {})".format, st.sampled_from(sorted(FUNCTIONS)), inner, inner),
    )


@given(st.recursive(st.sampled_from(["a", "b", "unset", "1", "'x'", "None", "[]"]), typed, max_leaves=12), JSON, JSON)
def test_every_expression_gives_json_or_a_refusal(source: str, a: object, b: object) -> None:
    with contextlib.suppress(BadExpression):
        expression = compile_expression(source)
        encode(expression.evaluate({"a": a, "b": b}))
        assert expression.names <= {"a", "b", "unset"}


@given(st.lists(st.sampled_from(TOKENS), max_size=25).map(" ".join) | st.text(), JSON, JSON)
def test_any_text_is_an_expression_or_a_refusal(source: str, a: object, b: object) -> None:
    with contextlib.suppress(BadExpression):
        compile_expression(source).evaluate({"a": a, "b": b})


@given(JSON, JSON)
def test_comparing_any_two_values_agrees_with_python(a: Any, b: Any) -> None:
    for symbol, swapped in itertools.product(["<", "<=", "==", "!=", "in", "not in"], [False, True]):
        variables = {"a": b, "b": a} if swapped else {"a": a, "b": b}
        expected, failed = python_value(f"a {symbol} b", variables)

        if failed:
            assert refusal_of(f"a {symbol} b", variables)
        else:
            assert value_of(f"a {symbol} b", variables) is expected
