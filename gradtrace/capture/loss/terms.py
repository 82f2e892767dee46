"""Which addend of a composite loss is non-finite, in the words of its source line where that shows it.

Follows sums of scalars from the loss on: additions on one line are one sum; a sum that was made on another line
is a sum of its own, and the innermost one that leads to the bad addend is reported.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence

from gradtrace.capture.graph import Edge
from gradtrace.capture.loss.region import bare_name, is_leaf
from gradtrace.capture.loss.values import Values, operation
from gradtrace.capture.operations.stacks import stack_of
from gradtrace.trace.confirmation import SourceLine

_DEEPEST = 50
_MOST_SAID = 3
_SCALES = frozenset({"Mul", "Div", "Neg", "View", "Squeeze", "ToCopy", "Clone"})
_SUMS = frozenset({"Add", "Sub", "Rsub"})
_LISTS = frozenset({"stack", "cat", "concat", "hstack", "sum"})


def failing_term(loss: Edge, values: Values, *, is_nan: bool) -> str | None:
    """Return which addend of a non-finite loss is non-finite; None for a loss that is no sum, or if none is known.

    The text is like ``term 2 of 3: MulBackward0, train.py:40: kl_weight * kl``. ``is_nan``: the loss holds a NaN,
    which no sum makes out of finite addends. To be called before the graph is freed.
    """
    text = None
    edge = loss
    for _ in range(_DEEPEST):
        terms = list(_addends(edge, values))
        if len(terms) == 1:
            below = terms[0] if terms[0] != edge else _scaled(edge, values)
            if below is None:
                break
            edge = below
            continue
        bad = _bad_terms(terms, values, is_nan)
        if bad:
            text = "; ".join(_describe(index, terms, edge) for index in bad[:_MOST_SAID])
            text += f"; and {len(bad) - _MOST_SAID} more" if len(bad) > _MOST_SAID else ""
        if len(bad) != 1:
            break
        edge = terms[bad[0]]
    return text


def _bad_terms(terms: Sequence[Edge], values: Values, is_nan: bool) -> list[int]:
    verdicts = [values.finite(term) for term in terms]
    bad = [index for index, finite in enumerate(verdicts) if finite is False]
    if not bad and is_nan and verdicts.count(None) == 1:
        bad = [verdicts.index(None)]
    return bad


def _scaled(edge: Edge, values: Values) -> Edge | None:
    """Return what was multiplied with a factor to which no gradient flows, or reshaped."""
    producers = _producers(edge)
    if not values.holds(edge[0]) or operation(edge[0]) not in _SCALES or len(producers) != 1:
        return None
    return producers[0]


def _addends(total: Edge, values: Values) -> Iterator[Edge]:
    """Yield the terms of a sum from left to right; a sum that was made on the same line is a part of it."""
    line = _line(total)
    pending = [(total, 0)]
    while pending:
        edge, depth = pending.pop()
        parts = _parts(edge, values) if depth < _DEEPEST and _line(edge) == line else []
        if parts:
            pending.extend((part, depth + 1) for part in reversed(parts))
        else:
            yield edge


def _parts(edge: Edge, values: Values) -> list[Edge]:
    """Return the scalars that are added up at an edge, constants left out; nothing if it is no sum."""
    node = edge[0]
    if not values.holds(node):
        return []
    name = operation(node)
    producers = _producers(edge)
    is_sum = name in _SUMS
    if name in ("Sum", "Mean") and len(producers) == 1 and values.holds(producers[0][0]):
        is_sum = operation(producers[0][0]) in ("Stack", "Cat")
        producers = _producers(producers[0])
    return producers if is_sum and all(map(_is_scalar, producers)) else []


def _producers(edge: Edge) -> list[Edge]:
    return [(step[0], step[1]) for step in edge[0].next_functions if step[0] is not None]


def _is_scalar(edge: Edge) -> bool:
    return all(size == 1 for size in edge[0]._input_metadata[edge[1]].shape)


def _line(edge: Edge) -> SourceLine | None:
    stack = () if is_leaf(edge[0]) else stack_of(edge[0])
    return stack[-1] if stack else None


def _describe(index: int, terms: Sequence[Edge], total: Edge) -> str:
    text = f"term {index + 1} of {len(terms)}: {bare_name(terms[index][0])}"
    sum_line, own_line = _line(total), _line(terms[index])
    expressions = _expressions(sum_line.code, len(terms)) if sum_line is not None else None
    if sum_line is not None and expressions is not None:
        return f"{text}, {_place(sum_line)}: {expressions[index]}"
    line = own_line or sum_line
    if line is None:
        return text
    is_apart = sum_line is not None and _place(line) != _place(sum_line)
    return f"{text}, {_place(line)}: {line.code}" if is_apart else f"{text}, {_place(line)}"


def _place(line: SourceLine) -> str:
    return f"{os.path.basename(line.file)}:{line.line}"


def _expressions(code: str, count: int) -> list[str] | None:
    """Return the source of the ``count`` addends in a line, None unless just one sum in it has so many."""
    try:
        sums = list(_sums(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    fitting = [terms for terms in sums if len(terms) == count]
    return [ast.unparse(term) for term in fitting[0]] if len(fitting) == 1 else None


def _sums(tree: ast.AST) -> Iterator[list[ast.expr]]:
    """Yield the addends of each sum in a line, constants left out; a part of a sum is no sum of its own."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        terms: list[ast.expr] = []
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            terms = [node.target, *_flat(node.value)]
        elif isinstance(node, ast.BinOp):
            terms = _flat(node)
        elif isinstance(node, ast.Call) and _called(node) in _LISTS:
            terms = [item for argument in node.args[:1] if isinstance(argument, ast.List) for item in argument.elts]
        if len(terms) > 1:
            yield [term for term in terms if not isinstance(term, ast.Constant)]
            pending.extend(terms)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _flat(expression: ast.expr) -> list[ast.expr]:
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Add, ast.Sub)):
        return [*_flat(expression.left), *_flat(expression.right)]
    return [expression]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
