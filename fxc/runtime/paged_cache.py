"""`PagedCache`: the key/value caches of a program built with `kv_cache`, and which sequence has which blocks."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch

from fxc.errors import RunError
from fxc.runtime.program import Program


class CacheFullError(RunError):
    """There are fewer free blocks than a batch needs. Nothing has changed: free a sequence and try again."""


@dataclass(eq=False)
class Sequence:
    """One request's tokens in the cache."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens whose keys and values are in the cache, or will be after the call that `batch` has prepared."""


class PagedCache:
    """Blocks for keys and values on the program's device, bound to the program.

    A block holds `block_size` tokens of every layer. What a call reads beside weights and caches is made by `batch`.
    """

    def __init__(self, program: Program, num_blocks: int) -> None:
        """
        Args:
            program: built with `kv_cache`.
            num_blocks: blocks of each layer; the memory they take is `bytes`.

        Raises:
            RunError: the program has no paged caches.
            InputError: fewer or more blocks than the program was built for.
        """
        manifest = program.manifest
        if manifest.spec.kv_cache is None:
            raise RunError(
                f"{manifest.model} was built without kv_cache", "add `kv_cache: {block_size: 16}` to model.yaml"
            )
        self.program = program
        self.block_size = manifest.spec.kv_cache.block_size
        self.num_blocks = num_blocks
        self.tensors = {
            entry.name: torch.zeros(
                [num_blocks, *(int(size) for size in entry.shape[1:])],
                dtype=getattr(torch, entry.dtype),
                device=program.device,
            )
            for entry in manifest.inputs
            if entry.bound
        }
        (table,) = (entry for entry in manifest.inputs if entry.name == "block_table")
        self.max_blocks = int(table.shape[1])
        (positions,) = (entry for entry in manifest.inputs if entry.name == "positions")
        self.max_tokens = int(positions.values[1]) if positions.values else self.max_blocks * self.block_size
        """Longest sequence."""
        program.bind_inputs(self.tensors)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def bytes(self) -> int:
        """Memory of all caches."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, sequence: Sequence, tokens: int) -> int:
        """How many blocks more `sequence` needs for so many new tokens."""
        return max(0, -(-(sequence.length + tokens) // self.block_size) - len(sequence.blocks))

    def batch(self, entries: Tokens[tuple[Sequence, Tokens[int]]]) -> dict[str, torch.Tensor]:
        """Inputs of one call for the new tokens of several sequences, and blocks for them.

        Args:
            entries: each sequence with the token ids that follow those it has: a prompt or a part of it, or the one
                token that was sampled last.

        Returns:
            Arguments of the program. Row `query_starts[i + 1] - 1` of its result belongs to the last token of entry i.

        Raises:
            CacheFullError: not enough free blocks.
            RunError: no tokens for a sequence, more than `max_tokens`, a sequence that comes twice, or more tokens or
                sequences than the program takes in a call. Nothing has changed then.
        """
        if len({id(sequence) for sequence, _ in entries}) < len(entries):
            raise RunError("a sequence is in the batch twice", "hand over all its new tokens as one entry")
        bounds = self.program.manifest.spec.dims
        for name, count in (("num_requests", len(entries)), ("num_tokens", sum(len(ids) for _, ids in entries))):
            if name in bounds and count > bounds[name].max:
                raise RunError(
                    f"the batch has {name} = {count}, expected at most {bounds[name].max}", "make it smaller"
                )
        for number, (sequence, ids) in enumerate(entries):
            if not ids:
                raise RunError(f"entry {number} of the batch has no tokens")
            if sequence.length + len(ids) > self.max_tokens:
                longest = self.max_tokens
                raise RunError(
                    f"entry {number} of the batch has {sequence.length + len(ids)} tokens, expected at most {longest}",
                    "build with a larger kv_cache.max_tokens",
                )
        needed = sum(self.blocks_for(sequence, len(ids)) for sequence, ids in entries)
        if needed > len(self._free):
            raise CacheFullError(
                f"the batch needs {needed} blocks more, {len(self._free)} are free", "free a sequence first"
            )
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, ids in entries:
            sequence.blocks += [self._free.pop() for _ in range(self.blocks_for(sequence, len(ids)))]
            places = range(sequence.length, sequence.length + len(ids))
            positions += places
            slots += [sequence.blocks[at // self.block_size] * self.block_size + at % self.block_size for at in places]
            sequence.length += len(ids)
            starts.append(len(positions))
        tables = [sequence.blocks + [0] * (self.max_blocks - len(sequence.blocks)) for sequence, _ in entries]
        made = {
            "input_ids": torch.tensor([token for _, ids in entries for token in ids], dtype=torch.int64),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "block_table": torch.tensor(tables, dtype=torch.int32),
            "seq_lens": torch.tensor([sequence.length for sequence, _ in entries], dtype=torch.int32),
            "query_starts": torch.tensor(starts, dtype=torch.int32),
        }
        return {name: tensor.to(self.program.device) for name, tensor in made.items()}

    def free(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back; it is empty then."""
        self._free += reversed(sequence.blocks)
        sequence.blocks.clear()
        sequence.length = 0
