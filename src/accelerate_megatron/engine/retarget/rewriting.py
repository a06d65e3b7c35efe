"""Apply the rules to the source of one module."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_megatron.engine.retarget.rules import RULES, TRIGGER, Rule


@dataclass(frozen=True)
class Hit:
    """A rule, the node it took out, with its position, and the node it put there."""

    rule: Rule
    before: ast.AST
    after: ast.AST


def may_match(source: bytes) -> bool:
    """Return whether any rule can match `source`; cheap, and never wrongly False."""
    return TRIGGER.search(source) is not None


def rewrite(source: bytes, *, module: str, path: str) -> tuple[ast.Module, list[Hit]]:
    """Return the rewritten syntax tree of `source`, and where rules changed it.

    Every new node takes the position of the node it replaces, so that tracebacks,
    debuggers and `inspect.getsource` go on showing the lines of the file on disk.
    """
    tree = ast.parse(source, path)
    rewriter = _Rewriter(module, _lines_with_triggers(source))
    rewriter.visit(tree)
    return ast.fix_missing_locations(tree), rewriter.hits


class _Rewriter:
    """Offer each node to the rules for its type, children first.

    Statements without a trigger on any of their lines are passed over, which is nearly
    all of them: every rank does this for a hundred modules when it starts.
    """

    def __init__(self, module: str, lines: Sequence[int]) -> None:
        self.hits: list[Hit] = []
        self._module = module
        self._lines = lines

    def visit(self, node: ast.AST) -> ast.AST:
        """Return `node` with its children rewritten, or what the first matching rule puts there."""
        if isinstance(node, ast.stmt) and not self._has_trigger(node):
            return node
        self._visit_children(node)
        for rule in _RULES_OF_TYPE.get(type(node), ()):
            after = rule.rewrite(node, self._module)
            if after is not None:
                if not hasattr(after, "lineno"):  # a part of `node` keeps its own position
                    ast.copy_location(after, node)
                self.hits.append(Hit(rule, node, after))
                return after
        return node

    def _visit_children(self, node: ast.AST) -> None:
        # The pieces of text in a formatted string are not strings of their own.
        kept = ast.Constant if isinstance(node, ast.JoinedStr) else ()
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                value[:] = [
                    self.visit(item)
                    if isinstance(item, ast.AST) and not isinstance(item, kept)
                    else item
                    for item in value
                ]
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))

    def _has_trigger(self, statement: ast.stmt) -> bool:
        decorators = getattr(statement, "decorator_list", [])
        first = min((node.lineno for node in decorators), default=statement.lineno)
        index = bisect_left(self._lines, first)
        last = statement.end_lineno or statement.lineno
        return index < len(self._lines) and self._lines[index] <= last


_RULES_OF_TYPE: dict[type[ast.AST], list[Rule]] = {}
for _rule in RULES:
    for _node_type in _rule.node_types:
        _RULES_OF_TYPE.setdefault(_node_type, []).append(_rule)


def _lines_with_triggers(source: bytes) -> list[int]:
    """Return the numbers of the lines that hold a trigger, in rising order."""
    lines, line, position = [], 1, 0
    for found in TRIGGER.finditer(source):
        line += source.count(b"\n", position, found.start())
        position = found.start()
        lines.append(line)
    return lines
