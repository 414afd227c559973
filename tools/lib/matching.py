"""Matches initializers of a file with PyTorch's parameters, so that their gradients can be compared.

Mostly the name table of `inspect` suffices, with one initializer for each parameter. But exporters also store one tied
parameter twice (its gradient is the sum of both), merge parameters with equal values into one initializer (its gradient is
the sum over the parameters), and pack several into one (each is a slice of it). Where the file has no name, contents are
compared. A group is a set of initializers and parameters that belong together: the summed gradients of both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tools.lib.reference import Reference

Tensors = dict[str, np.ndarray]
Contents = Callable[[], tuple[Tensors, Tensors]]
"""Values of PyTorch's parameters and buffers, and of the file's initializers, by name."""


@dataclass(frozen=True)
class Piece:
    """A parameter within an initializer: elements `first` to `last` of one axis, or all of it if `axis` is -1."""

    initializer: str
    transposed: bool
    axis: int = -1
    first: int = 0
    last: int = 0

    def of(self, tensor: np.ndarray) -> np.ndarray:
        if self.axis >= 0:
            tensor = tensor.take(range(self.first, self.last), self.axis)
        return tensor.T if self.transposed else tensor


@dataclass
class Matching:
    """`groups`: (pieces, names of parameters). `missing`: parameters with a gradient that match no initializer."""

    groups: list[tuple[list[Piece], list[str]]]
    missing: list[str]
    by_contents: list[str]
    buffers: dict[str, str] = field(default_factory=dict)
    """Trainable initializers that tell no name and hold what a buffer of PyTorch's holds, which the file cannot tell
    from a parameter."""
    table: list[dict] = field(default_factory=list)

    def initializers(self) -> set[str]:
        """Returns the initializers that hold a parameter, or a part of one."""
        return {piece.initializer for pieces, _ in self.groups for piece in pieces}

    def gradients(self, outputs: Tensors, wanted: Tensors) -> tuple[Tensors, Tensors]:
        """Ours and those of `wanted` by group, in PyTorch's layout.

        Refused: a trainable parameter without a gradient output, a gradient output or a trainable parameter, or a part
        of one, that PyTorch has no gradient for.
        """
        used: dict[str, int] = {}
        ours, theirs = {}, {}
        for pieces, names in self.groups:
            label = " + ".join(names)
            found = []
            for piece in pieces:
                output = f"{piece.initializer}.grad"
                if output not in outputs:
                    raise ValueError(f"no output {output} for the parameter {label}")
                found.append(piece.of(outputs[output]))
                used[output] = used.get(output, 0) + found[-1].size
            ours[label] = found[0] if len(found) == 1 else sum(found)
            theirs[label] = wanted[names[0]] if len(names) == 1 else sum(wanted[name] for name in names)
        strangers = {n for n in outputs if n.endswith(".grad") and used.get(n) != outputs[n].size}
        strangers |= {f"{e['initializer']}.grad" for e in self.table if e["trainable"]} - set(used)
        strangers -= {f"{name}.grad" for name in self.buffers}
        if strangers:
            raise ValueError(f"gradients that PyTorch has no parameter for: {', '.join(sorted(strangers))}")
        return ours, theirs


def match(table: list[dict], truth: Reference, contents: Contents | None) -> Matching:
    """Matches by name, then by contents, if `contents` are available. A parameter with a zero gradient may be missing:
    the graph does not use it.
    """
    known = {name: entry for entry in table for name in [entry["name"], *entry["aliases"]]}
    pieces: dict[str, list[Piece]] = {}
    for name in truth.full:
        names = [name, *(alias for alias, of in truth.aliases.items() if of == name)]
        entries = {known[n]["initializer"]: known[n] for n in names if n in known}
        pieces[name] = [Piece(initializer, entry["transposed"]) for initializer, entry in entries.items()]
    missing = [name for name, gradient in truth.full.items() if not pieces[name] and np.any(gradient)]
    taken = {piece.initializer for found in pieces.values() for piece in found}
    nameless = [e["initializer"] for e in table if e["trainable"] and e["initializer"] not in taken]
    by_contents: list[str] = []
    buffers: dict[str, str] = {}
    if (missing or nameless) and contents is not None:
        values, stored = contents()
        for name in missing:
            pieces[name] = next(search(values[name], stored, [e["initializer"] for e in table]), [])
        for name, value in values.items():
            for found in search(value, stored, nameless):
                if name in pieces:
                    pieces[name] += [piece for piece in found if piece not in pieces[name]]
                else:
                    buffers |= {piece.initializer: name for piece in found if piece.axis < 0}
        known_pieces = {piece.initializer for found in pieces.values() for piece in found}
        buffers = {initializer: name for initializer, name in buffers.items() if initializer not in known_pieces}
        by_contents = [name for name in missing if pieces[name]]
        missing = [name for name in missing if not pieces[name]]
    return Matching(grouped(pieces), missing, by_contents, buffers, table)


def search(value: np.ndarray, stored: Tensors, initializers: list[str]) -> Iterator[list[Piece]]:
    """Yields initializers that hold `value`: whole ones first, then slices of initializers of a multiple of its size."""
    for whole in (True, False):
        for name in (name for name in initializers if name in stored):
            for piece in candidates(name, value.shape, stored[name].shape, whole):
                if np.array_equal(piece.of(stored[name]), value):
                    yield [piece]
                    break


def candidates(name: str, wanted: tuple[int, ...], found: tuple[int, ...], whole: bool) -> Iterator[Piece]:
    for transposed in (False, True)[: 1 + (len(wanted) == 2)]:
        shape = wanted[::-1] if transposed else wanted
        if whole:
            if found == shape:
                yield Piece(name, transposed)
            continue
        for axis in range(len(found)):
            fits = len(found) == len(shape) and found[:axis] + found[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
            if fits and shape[axis] and found[axis] > shape[axis] and found[axis] % shape[axis] == 0:
                for first in range(0, found[axis], shape[axis]):
                    yield Piece(name, transposed, axis, first, first + shape[axis])


def grouped(pieces: dict[str, list[Piece]]) -> list[tuple[list[Piece], list[str]]]:
    """Returns connected parameters and pieces, in the order of the parameters."""
    groups: list[tuple[list[Piece], list[str]]] = []
    for name, found in pieces.items():
        if not found:
            continue
        joined = [group for group in groups if any(piece in group[0] for piece in found)]
        merged = [*dict.fromkeys([piece for group in joined for piece in group[0]] + found)]
        names = [n for group in joined for n in group[1]] + [name]
        groups = [group for group in groups if group not in joined] + [(merged, names)]
    return groups
