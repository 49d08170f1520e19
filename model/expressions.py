"""Conditions and mappings: a small language, written like Python, over the variables of an instance.

A source is parsed once into Python's `ast`, checked against what is allowed, and turned into nested functions. Nothing
is ever compiled to byte code, and no attribute of an object is ever read: values are plain JSON, and so are results. An
expression is total: it gives a value or a `BadExpression`, within limits on its size, its depth and the size of what it
makes. It must never see more of the process than the names it asks its lookup for.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import attrs

from understudy.model.errors import BadExpression

Fetch: TypeAlias = Callable[[str], object]  # Raises KeyError for a name that is not set.
Lookup: TypeAlias = Mapping[str, object] | Fetch

LIMIT_SOURCE = 2_000  # Characters.
LIMIT_DEPTH = 50
LIMIT_NODES = 500
LIMIT_BITS = 4_096  # Of an integer that an expression makes.
LIMIT_LENGTH = 10_000_000  # Of a string or list that an expression makes.


@attrs.frozen
class Expression:
    """One compiled expression; two of the same source are equal."""

    source: str
    names: frozenset[str] = attrs.field(eq=False)  # Every variable that the expression may look up.
    probed: frozenset[str] = attrs.field(eq=False)  # Those of them that it asks about with exists() or default().
    _run: _Run = attrs.field(eq=False, repr=False)

    def evaluate(self, lookup: Lookup) -> object:
        """Give the value, with variables from a mapping or from a function that raises KeyError for what is not set."""
        fetch = lookup if callable(lookup) else lookup.__getitem__
        try:
            return self._run(fetch)
        except _Fault as fault:
            raise BadExpression(f"cannot evaluate {self.source!r}: {fault}") from None

    def holds(self, lookup: Lookup) -> bool:
        """Evaluate a condition."""
        return truth(self.evaluate(lookup), source=self.source)


def compile_expression(source: str) -> Expression:
    """Check a source and make it ready to run; what is not in the language is a `BadExpression` that points at it."""
    if not isinstance(source, str):
        raise BadExpression(f"an expression must be a string, not a {type(source).__name__}")
    text = source.strip().replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise BadExpression("the expression is empty; write, for example, amount > 1000")
    if len(text) > LIMIT_SOURCE:
        raise BadExpression(f"the expression has {len(text):,} characters; at most {LIMIT_SOURCE:,} are allowed")
    compiler = _Compiler(text)
    run = compiler.compile(_parse(text))
    return Expression(text, frozenset(compiler.names), frozenset(compiler.probed), run)


def truth(value: object, *, source: str = "") -> bool:
    """Give the value of a condition. Only True and False are accepted: what is merely "truthy" is usually a mistake."""
    if value is True or value is False:
        return value
    what = f"the condition {source!r}" if source else "the condition"
    raise BadExpression(f"{what} gives {_kind(value)}; it must give True or False: compare it, or write bool(...)")


# --- the functions ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Function:
    """One function of the language; the documentation prints this."""

    signature: str
    says: str
    call: Callable[..., Any] = attrs.field(repr=False)
    takes: tuple[tuple[type, ...], ...]  # The types allowed for each argument.
    needs: int = attrs.field(default=attrs.Factory(lambda self: len(self.takes), takes_self=True))
    more: bool = False  # Whether any number of arguments may follow.


def _extreme(choose: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    return lambda first, *others: choose((first, *others) if others or not isinstance(first, list) else first)


def _round(number: float, digits: int | None = None) -> float:
    if digits is not None and abs(digits) > LIMIT_BITS:  # round(5, -10**9) would compute 10**10**9.
        raise ValueError
    return round(number, digits)


def _int(value: float | str) -> int:
    if isinstance(value, str) and len(value) > LIMIT_BITS:  # Reading digits takes quadratic time.
        raise ValueError
    return int(value)


def _on_path(*_: object) -> NoReturn:
    raise AssertionError("the compiler has a rule of its own for functions that take a path")


_ANY, _TEXT, _NUMBER, _LIST, _SIZED = (object,), (str,), (int, float), (list,), (str, list, dict)

FUNCTIONS: Mapping[str, Function] = {
    "len": Function("len(x)", "the length of a string, list or mapping", len, (_SIZED,)),
    "min": Function("min(list) or min(a, b, ...)", "the smallest", _extreme(min), (_ANY,), more=True),
    "max": Function("max(list) or max(a, b, ...)", "the largest", _extreme(max), (_ANY,), more=True),
    "sum": Function("sum(list)", "the sum of a list of numbers", sum, (_LIST,)),
    "abs": Function("abs(number)", "the number without its sign", abs, (_NUMBER,)),
    "round": Function("round(number, digits)", "rounded, halves to even", _round, (_NUMBER, (int,)), needs=1),
    "int": Function("int(x)", "a number without its fraction, also read from a string", _int, (_NUMBER + _TEXT,)),
    "float": Function("float(x)", "a number, also read from a string", float, (_NUMBER + _TEXT,)),
    "str": Function("str(x)", "the text of a string, number or boolean", str, (_NUMBER + _TEXT,)),
    "bool": Function("bool(x)", "False for None, False, 0 and whatever is empty; else True", bool, (_ANY,)),
    "lower": Function("lower(text)", "the text in small letters", str.lower, (_TEXT,)),
    "upper": Function("upper(text)", "the text in capital letters", str.upper, (_TEXT,)),
    "strip": Function("strip(text)", "the text without spaces at its ends", str.strip, (_TEXT,)),
    "startswith": Function("startswith(text, start)", "whether it starts so", str.startswith, (_TEXT, _TEXT)),
    "endswith": Function("endswith(text, end)", "whether it ends so", str.endswith, (_TEXT, _TEXT)),
    "contains": Function("contains(x, part)", "the same as: part in x", operator.contains, (_SIZED, _ANY)),
    "any": Function("any(list)", "whether one of them is true", any, (_LIST,)),
    "all": Function("all(list)", "whether each of them is true", all, (_LIST,)),
    "exists": Function("exists(order.coupon)", "whether it is set, and not None", _on_path, (_ANY,)),
    "default": Function("default(order.coupon, x)", "its value, or x if not set or None", _on_path, (_ANY, _ANY)),
}


# --- compiling --------------------------------------------------------------------------------------------------------

_Run: TypeAlias = Callable[[Fetch], Any]
_ALLOWED = (
    "allowed are names, numbers, strings, True, False, None, lists, mappings, comparisons, and, or, not, in, "
    f"+ - * / // %, a[0], a['x'], a.x, a if b else c, and the functions {', '.join(FUNCTIONS)}"
)


class _Fault(Exception):
    """Why an evaluation stops; leaves this module only as the text of a `BadExpression`."""


class _Missing(_Fault):
    """Something on a path is not there: what exists() and default() ask about."""


class _Compiler:
    """Turns the nodes of one source into functions, and gathers the names they use."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: set[str] = set()
        self.probed: set[str] = set()
        self.nodes = 0
        self.depth = 0

    def compile(self, node: ast.AST) -> _Run:
        rule = _RULES.get(type(node))
        if rule is None:
            self.refuse(node, f"`{self.segment(node)}` cannot be used here")
        self.nodes += 1
        self.depth += 1
        if self.nodes > LIMIT_NODES or self.depth > LIMIT_DEPTH:
            self.refuse(node, f"more than {LIMIT_NODES} parts, or nested deeper than {LIMIT_DEPTH}; split it")
        run = rule(self, node)
        self.depth -= 1
        return run

    def refuse(self, node: ast.AST, reason: str) -> NoReturn:
        line, offset_bytes = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        before = _line(self.source, line).encode()[:offset_bytes].decode(errors="ignore")
        raise BadExpression(_pointed(self.source, line, len(before), reason))

    def segment(self, node: ast.AST) -> str:
        return _short(ast.get_source_segment(self.source, node) or "")

    def variable(self, node: ast.AST, name: str) -> str:
        if name.startswith("__"):
            self.refuse(node, f"{name} cannot be the name of a variable or field")
        return name


def _parse(source: str) -> ast.expr:
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise BadExpression(_pointed(source, error.lineno or 1, (error.offset or 1) - 1, error.msg)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadExpression(f"this expression cannot be read ({str(error)!a}); {_ALLOWED}") from None


def _pointed(source: str, line: int, column: int, reason: str) -> str:
    start = max(0, column - 60)
    shown = _printable(_line(source, line))[start : start + 100]
    return f"{reason}\n    {shown}\n    {' ' * (max(column, 0) - start)}^\n{_ALLOWED}"


def _line(source: str, line: int) -> str:
    lines = source.split("\n")
    return lines[min(line, len(lines)) - 1]


# --- one rule for each kind of node -----------------------------------------------------------------------------------


def _constant(compiler: _Compiler, node: ast.Constant) -> _Run:
    value = node.value
    if value is not None and type(value) not in (bool, int, float, str):
        compiler.refuse(node, f"`{compiler.segment(node)}` cannot be used here")
    try:
        str(_bounded(value)).encode()
    except (_Fault, UnicodeEncodeError):
        compiler.refuse(node, "this literal is too large, or is not text")
    return lambda _: value


def _name(compiler: _Compiler, node: ast.Name) -> _Run:
    name = compiler.variable(node, node.id)
    compiler.names.add(name)

    def run(fetch: Fetch) -> object:
        try:
            return fetch(name)
        except KeyError:
            raise _Missing(f"{name} is not set") from None

    return run


def _attribute(compiler: _Compiler, node: ast.Attribute) -> _Run:
    name = compiler.variable(node, node.attr)
    base = compiler.compile(node.value)
    return lambda fetch: _entry(base(fetch), name, node.value)


def _subscript(compiler: _Compiler, node: ast.Subscript) -> _Run:
    base, index = compiler.compile(node.value), compiler.compile(node.slice)
    return lambda fetch: _entry(base(fetch), index(fetch), node.value)


def _entry(whole: Any, part: Any, node: ast.AST) -> object:
    try:
        if isinstance(whole, dict) and isinstance(part, str):
            return whole[part]
        if isinstance(whole, (list, str)) and isinstance(part, int) and not isinstance(part, bool):
            return whole[part]
    except (KeyError, IndexError):
        missing = repr(part) if isinstance(whole, dict) else f"[{part}]; its length is {len(whole)}"
        raise _Missing(f"{_text(node)} has no {_short(missing)}") from None
    if whole is None:
        raise _Missing(f"{_text(node)} is None, so it has no {_short(repr(part))}")
    raise _Fault(f"{_text(node)} is {_kind(whole)}, which cannot be indexed by {_kind(part)}")


def _compare(compiler: _Compiler, node: ast.Compare) -> _Run:
    operands = [node.left, *node.comparators]
    runs = [compiler.compile(operand) for operand in operands]
    links = [_link(compiler, *link) for link in zip(operands[:-1], node.ops, operands[1:], strict=True)]
    first, second, link = runs[0], runs[1], links[0]
    if len(links) == 1:
        return lambda fetch: link(first(fetch), second(fetch))

    def run(fetch: Fetch) -> object:
        left = first(fetch)
        for compare, operand in zip(links, runs[1:], strict=True):
            right = operand(fetch)
            if not compare(left, right):
                return False
            left = right
        return True

    return run


def _link(compiler: _Compiler, left: ast.expr, kind: ast.cmpop, right: ast.expr) -> Callable[[object, object], bool]:
    if isinstance(kind, (ast.Is, ast.IsNot)) and not (isinstance(right, ast.Constant) and right.value is None):
        compiler.refuse(right, "`is` can only be asked of None; write ==")
    symbol, compare = _COMPARISONS[type(kind)]

    def run(one: object, other: object) -> bool:
        try:
            return compare(one, other)
        except TypeError:
            raise _mismatch(symbol, (left, one), (right, other)) from None

    return run


def _bool_op(compiler: _Compiler, node: ast.BoolOp) -> _Run:
    *parts, last = [compiler.compile(value) for value in node.values]
    stops_at = isinstance(node.op, ast.Or)

    def run(fetch: Fetch) -> object:
        for part in parts:
            value = part(fetch)
            if bool(value) is stops_at:
                return value
        return last(fetch)

    return run


def _unary(compiler: _Compiler, node: ast.UnaryOp) -> _Run:
    operand = compiler.compile(node.operand)
    if isinstance(node.op, ast.Not):
        return lambda fetch: not operand(fetch)
    if isinstance(node.op, ast.Invert):
        compiler.refuse(node, "`~` cannot be used here; write not")
    change = operator.neg if isinstance(node.op, ast.USub) else operator.pos

    def run(fetch: Fetch) -> object:
        value = operand(fetch)
        if not isinstance(value, (int, float)):
            raise _Fault(f"{_text(node.operand)} is {_kind(value)}, and only numbers have a sign")
        return change(value)

    return run


def _binary(compiler: _Compiler, node: ast.BinOp) -> _Run:
    if type(node.op) not in _ARITHMETIC:
        compiler.refuse(node, f"`{compiler.segment(node)}`: of such operators only + - * / // % are allowed")
    symbol, work = _ARITHMETIC[type(node.op)]
    left, right = compiler.compile(node.left), compiler.compile(node.right)

    def run(fetch: Fetch) -> object:
        one, other = left(fetch), right(fetch)
        try:
            if isinstance(one, (int, float)) and isinstance(other, (int, float)):
                return _bounded(work(one, other))
            return _joined(symbol, one, other)
        except TypeError:
            raise _mismatch(symbol, (node.left, one), (node.right, other)) from None
        except ZeroDivisionError:
            raise _Fault(f"division by zero in {_text(node)}") from None
        except OverflowError:
            raise _Fault(_TOO_LARGE) from None

    return run


def _joined(symbol: str, one: Any, other: Any) -> object:
    if symbol != "+" or type(one) is not type(other) or not isinstance(one, (str, list)):
        raise TypeError
    if len(one) + len(other) > LIMIT_LENGTH:
        raise OverflowError
    return one + other


def _if_else(compiler: _Compiler, node: ast.IfExp) -> _Run:
    test, then, other = compiler.compile(node.test), compiler.compile(node.body), compiler.compile(node.orelse)
    return lambda fetch: then(fetch) if test(fetch) else other(fetch)


def _list(compiler: _Compiler, node: ast.List | ast.Tuple) -> _Run:
    """A tuple is a list here: a variable never holds a tuple, so comparing it with one would never be true."""
    elements = [compiler.compile(element) for element in node.elts]
    return lambda fetch: [element(fetch) for element in elements]


def _mapping(compiler: _Compiler, node: ast.Dict) -> _Run:
    pairs = []
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            compiler.refuse(key or value, "a key must be written as a string")
        compiler.compile(key)
        pairs.append((key.value, compiler.compile(value)))
    return lambda fetch: {key: value(fetch) for key, value in pairs}


def _call(compiler: _Compiler, node: ast.Call) -> _Run:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    function = FUNCTIONS.get(name)
    if function is None:
        compiler.refuse(node, f"{compiler.segment(node.func)} is not a function of this language")
    many = len(node.args)
    if node.keywords or many < function.needs or (many > len(function.takes) and not function.more):
        compiler.refuse(node, f"{name} is called as {function.signature}")
    if function.call is _on_path:
        return _probe(compiler, node)
    arguments = [compiler.compile(argument) for argument in node.args]

    def run(fetch: Fetch) -> object:
        values = [argument(fetch) for argument in arguments]
        try:
            if all(map(isinstance, values, function.takes)):
                return _bounded(function.call(*values))
        except (TypeError, ValueError, OverflowError):
            pass
        given = " and ".join(_kind(value) for value in values[:3])
        raise _Fault(f"{name} cannot work on {given}; {function.signature} gives {function.says}")

    return run


def _probe(compiler: _Compiler, node: ast.Call) -> _Run:
    """Compile exists(path) or default(path, value): the functions that may ask for what is not there."""
    root: ast.AST = node.args[0]
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    if not isinstance(root, ast.Name):
        compiler.refuse(node.args[0], "this must be a name, or a path such as order.items[0].price")
    compiler.probed.add(root.id)
    path, *others = [compiler.compile(argument) for argument in node.args]

    def found(fetch: Fetch) -> object:
        try:
            return path(fetch)
        except _Missing:
            return None

    if not others:
        return lambda fetch: found(fetch) is not None
    return lambda fetch: others[0](fetch) if (value := found(fetch)) is None else value


_RULES: Mapping[type[ast.AST], Callable[[_Compiler, Any], _Run]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Compare: _compare,
    ast.BoolOp: _bool_op,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.IfExp: _if_else,
    ast.List: _list,
    ast.Tuple: _list,
    ast.Dict: _mapping,
    ast.Call: _call,
}
_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", lambda part, whole: part in whole),
    ast.NotIn: ("not in", lambda part, whole: part not in whole),
    ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not),
}
_ARITHMETIC: Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}


# --- values -----------------------------------------------------------------------------------------------------------

_KINDS = {type(None): "None", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
_TOO_LARGE = "the result is too large"


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a mapping")


def _mismatch(symbol: str, left: tuple[ast.AST, object], right: tuple[ast.AST, object]) -> _Fault:
    one, other = (f"{_text(node)} is {_kind(value)}" for node, value in (left, right))
    return _Fault(f"{one} and {other}; `{symbol}` cannot be used on them")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > LIMIT_BITS:
        raise _Fault(_TOO_LARGE)
    if isinstance(value, float) and not math.isfinite(value):
        raise _Fault("the result is not a finite number")
    return value


def _text(node: ast.AST) -> str:
    return _short(ast.unparse(node))


def _short(text: str) -> str:
    return _printable(text if len(text) <= 60 else f"{text[:57]}...")


def _printable(text: str) -> str:
    return "".join(mark if mark.isprintable() else " " for mark in text)
