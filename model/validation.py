"""What can be wrong with a definition as a graph: all of it, at once.

Each rule looks at the whole definition and reports every place that breaks it, with the author's own line where that is
known. Nothing here may raise for a bad definition, stop at the first problem, or mend anything; what the steps read and
write is not looked at here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from keyword import iskeyword

from understudy.model.definition import Definition, Edge, Node
from understudy.model.durations import duration_ms, moment_ms
from understudy.model.errors import BadExpression, BadValue, Problem, Rejected
from understudy.model.expressions import compile_expression
from understudy.model.kinds import (
    Choice,
    End,
    Fork,
    Join,
    Receive,
    Saga,
    Start,
    Task,
    Terminate,
    Throw,
    Timer,
    rules_of,
)
from understudy.model.retry import Backoff
from understudy.model.values import check_name


def problems(definition: Definition) -> list[Problem]:
    """Everything that is wrong with the graph; empty if it can be run."""
    survey = _Survey(definition)
    return [problem for rule in _RULES for problem in rule(survey)]


def is_variable(name: object) -> bool:
    """Whether a variable may have this name: handlers take it as a parameter, and expressions name it."""
    return isinstance(name, str) and name.isidentifier() and not iskeyword(name) and not name.startswith("__")


def near(name: str, candidates: Iterable[str]) -> str:
    """A hint at the name that was probably meant, or nothing."""
    found = difflib.get_close_matches(name, sorted(set(candidates) - {name}), n=1)
    return f"did you mean {found[0]}?" if found else ""


class _Survey:
    """The definition, looked up by node and scope, without edges that lead nowhere: one mistake is told once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.nodes: dict[str, Node] = {}
        for node in definition.nodes:
            self.nodes.setdefault(node.id, node)
        self.scopes = {"": None} | {node.id: node for node in self.nodes.values() if rules_of(node).is_scope}
        self.sound = [edge for edge in definition.edges if edge.source in self.nodes and edge.target in self.nodes]
        self.loose = {edge.source for edge in definition.edges if edge.target not in self.nodes}

    def problem(self, code: str, message: str, node: str = "", *, hint: str = "") -> Problem:
        return Problem(code, message, node, self.definition.places.get(node, ""), hint)

    def outgoing(self, node: str) -> list[Edge]:
        return [edge for edge in self.sound if edge.source == node]

    def incoming(self, node: str) -> list[Edge]:
        return [edge for edge in self.sound if edge.target == node]

    def inside(self, scope: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.within == scope]

    def around(self, node: Node) -> Iterator[Node]:
        """The scope nodes around a node, from the inside out; ends at one that is unknown or seen before."""
        seen = {node.id}
        scope = self.scopes.get(node.within)
        while scope is not None and scope.id not in seen:
            yield scope
            seen.add(scope.id)
            scope = self.scopes.get(scope.within)


def _spread(edges: Iterable[tuple[str, str]], starts: Iterable[str]) -> set[str]:
    """All that can be reached from the starts."""
    steps: dict[str, list[str]] = {}
    for source, target in edges:
        steps.setdefault(source, []).append(target)
    reached = set(starts)
    frontier = list(reached)
    while frontier:
        for target in steps.get(frontier.pop(), ()):
            if target not in reached:
                reached.add(target)
                frontier.append(target)
    return reached


def _title(scope: str) -> str:
    return f"the scope {scope}" if scope else "the process"


# --- names ------------------------------------------------------------------------------------------------------------


def _names(survey: _Survey) -> Iterator[Problem]:
    definition = survey.definition
    named = [("the process", definition.name, "")]
    named += [("a node's id", node.id, node.id) for node in definition.nodes]
    named += [("an edge's id", edge.id, edge.source) for edge in definition.edges]
    for node in definition.nodes:
        named += [(f"{field} of {node.id}", name, node.id) for field, name in _names_of(node)]
    for what, name, at in named:
        try:
            check_name(name, what=what)
        except BadValue as error:
            yield survey.problem("bad_name", str(error), at)


def _names_of(node: Node) -> Iterator[tuple[str, str]]:
    if isinstance(node, Task):
        yield "the handler", node.handler
        yield "the lane", node.lane
        if node.undo is not None:
            yield "the undo's handler", node.undo.handler
    elif isinstance(node, Receive | Throw):
        yield "the message", node.message


def _variables(survey: _Survey) -> Iterator[Problem]:
    definition = survey.definition
    named = [("an input", given.name, "") for given in definition.inputs]
    named += [("the result", definition.gives, "")] if definition.gives else []
    for node in definition.nodes:
        named += [(f"{field} of {node.id}", name, node.id) for field, name in _variables_of(node)]
    for what, name, at in named:
        if not is_variable(name):
            hint = "variables are named like Python parameters: letters, digits and _, and no keyword"
            yield survey.problem("bad_variable", f"{what} is called {name!r}, which no variable can be", at, hint=hint)


def _variables_of(node: Node) -> Iterator[tuple[str, str]]:
    if isinstance(node, Task | Receive) and node.into:
        yield "into", node.into
    if isinstance(node, Task):
        yield from (("a parameter", name) for name in (*node.needs, *node.may))
        if node.undo is not None:
            yield from (("a parameter of the undo", name) for name in (*node.undo.needs, *node.undo.may))


def _duplicates(survey: _Survey) -> Iterator[Problem]:
    definition = survey.definition
    for node in _repeated(node.id for node in definition.nodes):
        yield survey.problem("duplicate_node", f"two nodes are called {node}", node, hint="give one another id")
    for edge in _repeated(edge.id for edge in definition.edges):
        source = next(e.source for e in definition.edges if e.id == edge)
        yield survey.problem("duplicate_edge", f"two edges are called {edge}", source, hint="give one another id")
    for given in _repeated(given.name for given in definition.inputs):
        yield survey.problem("duplicate_input", f"two inputs are called {given}")


def _repeated(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [name for name, count in seen.items() if count > 1]


def _result(survey: _Survey) -> Iterator[Problem]:
    definition = survey.definition
    given = {item.name for item in definition.inputs}
    given |= {node.into for node in definition.nodes if isinstance(node, Task | Receive)}
    if definition.gives and definition.gives not in given and not definition.open_inputs:
        hint = near(definition.gives, given) or "name a variable that a step gives, or a task that is among the steps"
        message = f"the result is {definition.gives}, which no step and no input gives"
        yield survey.problem("unknown_result", message, hint=hint)


# --- scopes and edges -------------------------------------------------------------------------------------------------


def _scopes(survey: _Survey) -> Iterator[Problem]:
    for node in survey.nodes.values():
        if node.within not in survey.scopes:
            message = f"{node.id} is within {node.within}, which is not a scope of this process"
            yield survey.problem("unknown_scope", message, node.id)
        elif node.id in {scope.within for scope in survey.around(node)} or node.within == node.id:
            yield survey.problem("scope_in_itself", f"{node.id} is within itself", node.id)


def _starts_and_ends(survey: _Survey) -> Iterator[Problem]:
    for scope in survey.scopes:
        starts = [node.id for node in survey.inside(scope) if isinstance(node, Start)]
        if not starts:
            yield survey.problem("no_start", f"{_title(scope)} has no start", scope)
        if len(starts) > 1:
            yield survey.problem("many_starts", f"{_title(scope)} has {len(starts)} starts: {', '.join(starts)}", scope)
        if not any(isinstance(node, End | Terminate) for node in survey.inside(scope)):
            yield survey.problem("no_end", f"{_title(scope)} has no end", scope)


def _edges(survey: _Survey) -> Iterator[Problem]:
    for edge in survey.definition.edges:
        for role, node in (("comes from", edge.source), ("leads to", edge.target)):
            if node not in survey.nodes:
                message = f"the edge {edge.id} {role} {node}, which is not a node"
                yield survey.problem("dangling_edge", message, edge.source, hint=near(node, survey.nodes))
    for edge in survey.sound:
        yield from _ends_of(survey, edge)
        yield from _conditions_of(survey, edge)


def _ends_of(survey: _Survey, edge: Edge) -> Iterator[Problem]:
    source, target = survey.nodes[edge.source], survey.nodes[edge.target]
    if edge.source == edge.target:
        hint = "a loop needs a step or a gateway between"
        yield survey.problem(
            "self_loop", f"the edge {edge.id} leads from {edge.source} to itself", edge.source, hint=hint
        )
    if source.within != target.within:
        message = f"the edge {edge.id} leads from {_title(source.within)} into {_title(target.within)}"
        hint = "a scope is entered by its start and left by its end"
        yield survey.problem("edge_crosses_scope", message, edge.source, hint=hint)
    if isinstance(source, End | Terminate):
        yield survey.problem("edge_from_end", f"the edge {edge.id} leaves {source.id}, where tokens end", edge.source)
    if isinstance(target, Start):
        yield survey.problem("edge_to_start", f"the edge {edge.id} leads back to {target.id}", edge.source)


def _conditions_of(survey: _Survey, edge: Edge) -> Iterator[Problem]:
    source = survey.nodes[edge.source]
    if edge.is_default and edge.condition:
        message = f"the default edge {edge.id} has the condition {edge.condition!r}, which nobody would ask"
        yield survey.problem("default_has_condition", message, edge.source)
    if edge.condition and not isinstance(source, Choice):
        message = f"the edge {edge.id} has the condition {edge.condition!r}, but {source.id} is not a choice"
        yield survey.problem("condition_outside_choice", message, edge.source, hint="put a choice before it")
    if edge.is_default and not isinstance(source, Choice):
        yield survey.problem(
            "default_outside_choice", f"{edge.id} is a default, but {source.id} is not a choice", edge.source
        )
    if edge.is_late and not isinstance(source, Receive):
        message = f"the edge {edge.id} is for being late, but {source.id} waits for no message"
        yield survey.problem("late_outside_wait", message, edge.source)


def _expressions(survey: _Survey) -> Iterator[Problem]:
    sources = [(edge.source, f"the condition of {edge.id}", edge.condition) for edge in survey.definition.edges]
    for node in survey.definition.nodes:
        sources += [
            (node.id, f"{field} of {node.id}", text) for field, text in rules_of(node).expressions(node).items()
        ]
    for at, what, text in sources:
        try:
            _ = text and compile_expression(text)
        except BadExpression as error:
            yield survey.problem("bad_expression", f"{what}: {error}", at)


# --- kinds of node ----------------------------------------------------------------------------------------------------


def _choices(survey: _Survey) -> Iterator[Problem]:
    for node in survey.nodes.values():
        if not isinstance(node, Choice):
            continue
        edges = survey.outgoing(node.id)
        defaults = [edge.id for edge in edges if edge.is_default]
        bare = [edge.id for edge in edges if not edge.condition and not edge.is_default]
        if not any(edge.condition for edge in edges):
            yield survey.problem("choice_without_edges", f"{node.id} has no edge with a condition", node.id)
        if len(defaults) > 1:
            yield survey.problem(
                "many_defaults", f"{node.id} has {len(defaults)} defaults: {', '.join(defaults)}", node.id
            )
        if bare:
            message = f"{', '.join(bare)}: neither a condition nor the default, so {node.id} never takes it"
            yield survey.problem("edge_without_condition", message, node.id)


def _gateways(survey: _Survey) -> Iterator[Problem]:
    for node in survey.nodes.values():
        ways_in, ways_on = survey.incoming(node.id), survey.outgoing(node.id)
        late = [edge for edge in ways_on if edge.is_late]
        if isinstance(node, Fork) and len(ways_on) < 2:
            message = f"{node.id} has {len(ways_on)} branch(es); a fork needs at least two"
            yield survey.problem("fork_with_one_branch", message, node.id, hint="leave the fork out")
        if isinstance(node, Join) and len(ways_in) < 2:
            message = f"{node.id} has {len(ways_in)} way(s) in; a join needs at least two"
            yield survey.problem("join_with_one_input", message, node.id, hint="leave the join out")
        if not isinstance(node, Fork | Choice | End | Terminate) and len(ways_on) - len(late) > 1:
            message = f"{node.id} has {len(ways_on) - len(late)} ways on, of which only the first would be taken"
            yield survey.problem("many_ways_on", message, node.id, hint="put a fork or a choice behind it")
        if len(late) > 1:
            yield survey.problem("many_late", f"{node.id} has {len(late)} edges for being late", node.id)


def _tasks(survey: _Survey) -> Iterator[Problem]:
    for node in survey.nodes.values():
        if not isinstance(node, Task):
            continue
        yield from _policy(survey, node, node.id, node.retry, node.timeout_ms)
        if node.undo is not None:
            yield from _policy(survey, node, f"the undo of {node.id}", node.undo.retry, node.undo.timeout_ms)
            if not any(isinstance(scope, Saga) for scope in survey.around(node)):
                message = f"{node.id} has an undo, {node.undo.handler}, but is in no saga: it would never run"
                yield survey.problem("undo_without_saga", message, node.id, hint="put the step into saga(...)")
        for field, value, allowed in (
            ("on_failure", node.on_failure, ("", "incident", "fail")),
            ("isolation", node.isolation, ("", "process")),
        ):
            if value not in allowed:
                message = f"{node.id} has {field}={value!r}; it is one of {', '.join(map(repr, allowed))}"
                yield survey.problem("bad_option", message, node.id)
        if node.transactional and (node.isolation or node.lane != "local"):
            message = f"{node.id} is transactional: it runs here, on the database's own connection"
            yield survey.problem("bad_option", message, node.id, hint="leave out isolation and lane")


def _policy(survey: _Survey, node: Task, what: str, retry: Backoff, timeout_ms: int | None) -> Iterator[Problem]:
    if retry.attempts < 1:
        yield survey.problem("bad_retry", f"{what} is tried {retry.attempts} times; at least 1 is needed", node.id)
    if retry.first_ms < 0 or retry.maximum_ms < 0 or not 0 <= retry.jitter <= 1:
        message = f"{what} waits {retry.first_ms} to {retry.maximum_ms} ms with jitter {retry.jitter} before a retry"
        yield survey.problem("bad_retry", message, node.id, hint="delays are 0 or more, the jitter is 0 to 1")
    if not (math.isfinite(retry.factor) and retry.factor >= 1):
        yield survey.problem("bad_retry", f"{what} has the factor {retry.factor}; it must be 1 or more", node.id)
    if timeout_ms is not None and timeout_ms <= 0:
        yield survey.problem("bad_timeout", f"{what} has a timeout of {timeout_ms} ms; it must be more than 0", node.id)


def _waits(survey: _Survey) -> Iterator[Problem]:
    for node in survey.nodes.values():
        if isinstance(node, Receive):
            if node.timeout_ms is not None and node.timeout_ms <= 0:
                message = f"{node.id} has a timeout of {node.timeout_ms} ms; it must be more than 0"
                yield survey.problem("bad_timeout", message, node.id)
            if node.timeout_ms is None and any(edge.is_late for edge in survey.outgoing(node.id)):
                message = f"{node.id} says what to do when it is late, but not when that is"
                yield survey.problem("late_without_timeout", message, node.id, hint="give it a timeout")
        elif isinstance(node, Throw) and node.ttl_ms is not None and node.ttl_ms <= 0:
            message = f"{node.id} has a time to live of {node.ttl_ms} ms; it must be more than 0"
            yield survey.problem("bad_timeout", message, node.id)
        elif isinstance(node, Timer):
            yield from _timer(survey, node)


def _timer(survey: _Survey, node: Timer) -> Iterator[Problem]:
    if bool(node.after) == bool(node.until):
        yield survey.problem("bad_timer", f"{node.id} needs either a duration or a date", node.id)
    for source, read in ((node.after, duration_ms), (node.until, moment_ms)):
        try:
            expression = compile_expression(source) if source else None
            if expression is not None and not expression.names:
                read(expression.evaluate({}))  # type: ignore[arg-type]  # What it cannot read, it refuses.
        except BadExpression:
            continue  # Reported with the other expressions.
        except Rejected as error:
            yield survey.problem("bad_timer", f"{node.id}: {error}", node.id)


# --- ways -------------------------------------------------------------------------------------------------------------


def _orphans(survey: _Survey) -> Iterator[Problem]:
    """Nodes that no token can reach. What only hangs behind a reported one is not reported again."""
    forth = [(edge.source, edge.target) for edge in survey.sound]
    for scope in survey.scopes:
        nodes = [node.id for node in survey.inside(scope)]
        starts = [node.id for node in survey.inside(scope) if isinstance(node, Start)]
        if not starts:
            continue
        reached = _spread(forth, starts)
        lost = [node for node in nodes if node not in reached]
        heads = [node for node in lost if not survey.incoming(node)]
        behind = _spread(forth, heads)
        for node in heads + [node for node in lost if node not in behind]:
            hint = "it stands behind an end, or an edge is missing"
            yield survey.problem("orphan", f"no way leads from the start to {node}", node, hint=hint)


def _traps(survey: _Survey) -> Iterator[Problem]:
    """Nodes that a token can reach but never leave for an end."""
    forth = [(edge.source, edge.target) for edge in survey.sound]
    back = [(target, source) for source, target in forth]
    for scope in survey.scopes:
        inside = survey.inside(scope)
        ends = [node.id for node in inside if isinstance(node, End | Terminate)]
        if not ends:
            continue
        reached = _spread(forth, [node.id for node in inside if isinstance(node, Start)])
        ending = _spread(back, [*ends, *survey.loose])
        trapped = [node.id for node in inside if node.id in reached and node.id not in ending]
        stops = [node for node in trapped if not survey.outgoing(node)]
        before = _spread(back, stops)
        circling = [node for node in trapped if node not in before]
        for node in stops:
            yield survey.problem("no_way_out", f"no way leads from {node} to an end", node)
        if circling:
            message = f"no way leads from {', '.join(circling)} to an end"
            yield survey.problem("no_way_out", message, circling[0], hint="a loop needs a condition to leave it by")


_RULES: tuple[Callable[[_Survey], Iterator[Problem]], ...] = (
    _names,
    _variables,
    _duplicates,
    _scopes,
    _starts_and_ends,
    _edges,
    _expressions,
    _choices,
    _gateways,
    _tasks,
    _waits,
    _orphans,
    _traps,
    _result,
)
