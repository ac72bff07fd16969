"""The mutants of one module, made by mutmut's operators.

mutmut's own runner cannot map this layout: it names modules after their paths, and the five source roots are one
namespace package. So only its generator is used.

Not mutated: what stands in `raise`, because messages are for people; docstrings and annotations; what mutmut leaves out
(arguments of `len` and `isinstance`); defaults of dataclass fields; and what compiles to the same code as before.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

import libcst as cst
from mutmut.mutation.file_mutation import Mutation, create_mutations

from mutants.install import ROOT, Mutant

_PROPERTY = re.compile(r"^( +)@(property|cached_property)$", re.MULTILINE)  # mutmut skips decorated functions


def unchanged(path: str) -> list[Mutant]:
    """No mutants: each function of the module as it is. For a control."""
    source = (ROOT / path).read_text()
    return [Mutant(path, where, lines.start, "", "", source) for where, lines in lines_of(path).items()]


def mutants_of(path: str) -> Iterator[Mutant]:
    """All mutants of the module at `path`, in the order of its lines."""
    original = (ROOT / path).read_text()
    plain = _PROPERTY.sub(r"\1# \2", original)
    lines = plain.splitlines()
    module, mutations, _, _ = create_mutations(path, plain)
    before = _codes(plain, path)
    messages = _nodes_in_raise(module)
    found = []
    for mutation in mutations:
        if mutation.original_node in messages or not _is_of_code(module, mutation):
            continue
        mutated = module.deep_replace(mutation.original_node, mutation.mutated_node).code  # type: ignore[arg-type]
        where = _differs_in(before, _codes(mutated, path))
        if where:
            line, was, became = _difference(lines, mutated.splitlines())
            found.append(Mutant(path, where, line, was, became, mutated))
    yield from sorted(found, key=lambda mutant: mutant.line)


def lines_of(path: str) -> dict[str, range]:
    """The lines of every function of the module, by its name."""
    found: dict[str, range] = {}

    def visit(body: list[ast.stmt], outer: str) -> None:
        for item in body:
            if isinstance(item, ast.ClassDef):
                visit(item.body, f"{outer}{item.name}.")
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                found[outer + item.name] = range(item.body[0].lineno, (item.end_lineno or item.lineno) + 1)

    visit(ast.parse((ROOT / path).read_text()).body, "")
    return found


def _codes(source: str, path: str) -> dict[str, str]:
    """A dump of every function and module constant, without the places of nodes."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], outer: str) -> None:
        for item in body:
            if isinstance(item, ast.ClassDef):
                visit(item.body, f"{outer}{item.name}.")
            elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                found[outer + item.name] = ast.dump(item)
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and not outer:
                found[item.targets[0].id] = ast.dump(item)

    visit(ast.parse(source, path).body, "")
    return found


def _differs_in(before: dict[str, str], after: dict[str, str]) -> str:
    changed = [name for name, code in after.items() if before.get(name) != code]
    return changed[0] if len(changed) == 1 else ""


def _is_of_code(module: cst.Module, mutation: Mutation) -> bool:
    """Whether it stands in a function, or is a constant of the module in capitals."""
    if isinstance(mutation.contained_by_top_level_function, cst.FunctionDef):
        return True
    for statement in module.body:
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Assign):
            target = statement.body[0].targets[0].target
            is_constant = isinstance(target, cst.Name) and target.value.isupper()
            if is_constant and _holds(statement, mutation.original_node):
                return True
    return False


def _holds(tree: cst.CSTNode, node: cst.CSTNode) -> bool:
    return tree is node or any(_holds(child, node) for child in tree.children)


def _nodes_in_raise(module: cst.Module) -> set[cst.CSTNode]:
    found: set[cst.CSTNode] = set()

    class Raises(cst.CSTVisitor):
        inside = 0

        def on_visit(self, node: cst.CSTNode) -> bool:
            self.inside += isinstance(node, cst.Raise)
            if self.inside:
                found.add(node)
            return True

        def on_leave(self, original_node: cst.CSTNode) -> None:
            self.inside -= isinstance(original_node, cst.Raise)

    module.visit(Raises())
    return found


def _difference(before: list[str], after: list[str]) -> tuple[int, str, str]:
    """The first line that differs, and what differs, as it was and as it became."""
    steps = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    changed = [step for step in steps if step[0] != "equal"]
    first, was, became = changed[0][1], [], []
    for _, start, end, other_start, other_end in changed:
        was += [_without_comment(line) for line in before[start:end]]
        became += [_without_comment(line) for line in after[other_start:other_end]]
    return first + 1, " ".join(was), " ".join(became)


def _without_comment(line: str) -> str:
    return line.split("  # ")[0].strip()
