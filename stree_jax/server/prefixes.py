"""Caches states: a prompt that begins with a cached text prefills only the rest.

Cached texts form a prefix tree. A node is a run of tokens after its parent's text; it
holds these tokens' rows of the KV caches, which all texts that go through the node
share. At the end of a node there may also be a kept state: the arrays that belong to
this position of the text, such as SSM states.

An SSM state cannot be rolled back, so a text of a model with SSM layers is continued
from the nearest kept state. If all layers are attention, a text is continued from any
token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from stree_jax.models import PREFILL_CHUNK
from stree_jax.server.host_states import Arrays, Form, bytes_of

# Prefixes with fewer tokens are neither kept nor reused: prefill of so few tokens takes
# no longer than copying a state.
LEAST = 16
# The states that are kept within the longest text may take this share of the limit.
SHARE = 4


@dataclass(eq=False)
class Node:
    """A node of the prefix tree, with tokens that follow the text of its parent.

    Attributes:
      tokens: [m] int32. The tokens of the run.
      start: number of tokens before it.
      rows: for each KV cache, the rows of these tokens. It has fewer than m rows if the
        model of the cache, such as a draft model, has not read all tokens.
      parent: the node before it, or None for the root.
      children: the nodes after it, by their first token.
      kept: the kept state at its end, which is the arrays that are not KV caches, or
        None.
      used: the time at which a prompt last went through the node, in prompts.
      hits: number of prompts that continued its kept state.
      check: for a node whose arrays are mapped from a file: reads the file and returns
        False if it is damaged. None if there is nothing to check.
    """

    tokens: np.ndarray
    start: int
    rows: Arrays
    parent: "Node | None"
    children: dict[int, "Node"] = field(default_factory=dict)
    kept: Arrays | None = None
    used: int = 0
    hits: int = 0
    check: Callable[[], bool] | None = None

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the node."""
        return self.start + len(self.tokens)

    @property
    def run_bytes(self) -> int:
        """Bytes of the node's tokens and their rows."""
        return self.tokens.nbytes + bytes_of(self.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept state."""
        return bytes_of(self.kept or ())

    def path(self) -> list["Node"]:
        """Returns the nodes from the first one after the root to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def text(self) -> np.ndarray:
        """Returns all tokens up to the end of the node."""
        runs = [node.tokens for node in self.path()]
        return np.concatenate(runs) if runs else np.zeros(0, np.int32)

    def descendants(self) -> Iterator["Node"]:
        """Yields the node and all nodes after it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def kept_before(self) -> int:
        """Returns the number of tokens up to the last kept state before its end."""
        node = self.parent
        while node is not None and node.kept is None:
            node = node.parent
        return 0 if node is None else node.end

    def first_left(self) -> "Node":
        """Returns the first node of the run of nodes that are of no use without this
        one: nodes without a kept state and without other children."""
        node = self
        while (
            node.parent is not None
            and node.parent.parent is not None
            and node.parent.kept is None
            and len(node.parent.children) == 1
        ):
            node = node.parent
        return node


@dataclass(frozen=True)
class Found:
    """A cached prefix of a prompt.

    Attributes:
      length: number of tokens of the prefix, from whose state the prompt continues; 0
        if there is none.
      common: number of tokens that the prompt has in common with cached texts.
      restored: copies the state after the prefix to the device. None without a prefix.
    """

    length: int
    common: int
    restored: Callable[[], Any] | None = None


NOTHING = Found(0, 0)


class Prefixes:
    """A cache of texts with their states, whose bytes are limited.

    If it is full, it evicts the state that saves the fewest tokens of prefill for its
    bytes, weighted by how recently and how often it was used.

    Attributes:
      limit: maximum bytes. If 0, nothing is kept.
      form: the arrays of the states.
      hits: number of prompts that continued a cached text.
      tokens: number of prompt tokens that were not prefilled.
      bytes: bytes of all cached states.
      on_change: called with a node that was added or changed, and with True if it was
        removed. For copies on disk.
    """

    def __init__(self, limit: int, can_cut: bool = True) -> None:
        """Makes an empty cache. Set its `form` before it is used.

        Args:
          limit: maximum bytes.
          can_cut: True if the drafter's states may be cut back, see
            `DrafterBase.cuts_back`.
        """
        self.limit, self.can_cut = limit, can_cut
        self.form = Form((), None)
        self.hits = self.tokens = self.bytes = self._now = self._states = 0
        self.on_change: Callable[[Node, bool], None] = lambda node, removed: None
        self._root = self._empty()

    def _empty(self) -> Node:
        return Node(np.zeros(0, np.int32), 0, (), None)

    @property
    def cuts(self) -> bool:
        """True if a text can be continued from any token."""
        return self.can_cut and self.form.only_caches

    def __len__(self) -> int:
        """Returns the number of kept states. May be called from any thread."""
        return self._states

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes but the root, parents first."""
        return (n for n in self._root.descendants() if n.parent is not None)

    def clear(self) -> None:
        """Forgets all texts. Copies on disk stay until the next start."""
        self._root, self.bytes, self._states = self._empty(), 0, 0

    def spacing(self, context: int, chunk: int = PREFILL_CHUNK) -> int | None:
        """Returns the number of tokens between kept states within a prompt, or None if
        only its ends can be kept.

        The states and KV caches of a text of `context` tokens then take at most one in
        `SHARE` bytes of the limit. If the caches alone take more, the states take as
        much as a quarter of that.

        Args:
          context: most tokens of a text.
          chunk: tokens per prefill pass. The result is a multiple of it.
        """
        share = self.limit // SHARE
        spare = max(share - context * self.form.token_bytes, share // 4)
        count = spare // max(self.form.state_bytes, 1)
        if self.cuts or count <= 0:
            return None
        return max(-(-context // count // chunk), 1) * chunk

    def find(self, ids: Sequence[int]) -> Found:
        """Returns the longest cached prefix of a prompt from which it can continue,
        without the prompt's last token."""
        self._now += 1
        path, common = self._walk(np.asarray(ids[:-1], np.int32))
        for node in path:
            if node.end <= common:
                node.used = self._now
        states = [n for n in path if n.kept is not None and n.end <= common]
        length = states[-1].end if states else 0
        cut = common - self.form.has_last  # arrays of the last token come from the next
        if self.cuts and cut > length:
            found = Found(cut, common, lambda: self._restored(path, cut))
        elif states:
            node = states[-1]
            found = Found(length, common, lambda: self._restored(node.path(), None))
        else:
            return Found(0, common)
        if found.length < LEAST:
            return Found(0, common)
        if not self.cuts:
            states[-1].hits += 1
        self.hits += 1
        self.tokens += found.length
        return found

    def _restored(self, path: list[Node], cut: int | None) -> Any:
        """Returns a past on the device.

        Args:
          path: the nodes of its text.
          cut: number of tokens after which the text is continued, or None for the kept
            state at the end of the path.
        """
        rows = [node.rows for node in path]
        kept = self.form.after(rows, cut) if cut is not None else path[-1].kept
        assert kept is not None  # chosen by `find`
        return self.form.joined(kept, rows)

    def add(self, text: Sequence[int], past: Any) -> None:
        """Caches the states after a text, and evicts other states while all together
        exceed the limit.

        Args:
          text: the token ids of the text. The states have read all but the last one.
          past: states of target and drafter of one row, on the device.
        """
        arrays = jax.tree.leaves(past)
        caches = [np.asarray(arrays[i]) for i in self.form.caches]
        kept = self.form.kept(arrays)
        node = self.insert(np.asarray(text[:-1], np.int32), 0, tuple(caches), kept)
        if node is not None:
            self.evict(node)

    def insert(
        self, ids: np.ndarray, start: int, caches: Arrays, kept: Arrays | None
    ) -> Node | None:
        """Adds a text to the tree, and copies the rows that are new.

        Args:
          ids: [n] int32. The tokens that the states have read.
          start: number of tokens at the beginning whose rows are cached already.
          caches: for each KV cache, rows of the tokens after `start`.
          kept: the other arrays; None if no state is kept at the end of the text.

        Returns:
          The node at the end of the text, or None if the text cannot be cached.
        """
        path, common = self._walk(ids)
        node = path[-1] if path else self._root
        if common < start or not len(ids):
            return None  # rows in between are missing
        if kept is not None and max(self.form.read_by(kept), default=0) > len(ids):
            if not self.cuts:
                return None
            kept = self.form.cut(kept, len(ids))
        inside = common < node.end
        if inside and (common < len(ids) or not self.cuts):
            node = self._split(node, common - node.start)
        if common < len(ids):
            node = self._grown(node, ids)
        read = [len(ids)] * len(caches) if kept is None else self.form.read_by(kept)
        for one in node.path():
            self._fill(one, start, caches, read)
            one.used = self._now
        if kept is not None and node.kept is None and node.end == len(ids):
            node.kept = kept
            self._states += 1
            self.bytes += node.kept_bytes
            self.on_change(node, False)
        return node

    def _walk(self, ids: np.ndarray) -> tuple[list[Node], int]:
        """Follows a text through the tree. Returns the nodes and the number of equal
        tokens. The last node may match only in part. Drops damaged nodes."""
        node, path, at = self._root, [], 0
        while at < len(ids) and (after := node.children.get(int(ids[at]))) is not None:
            if after.check is not None and not after.check():
                self.drop(after)
                return self._walk(ids)
            after.check = None
            path.append(after)
            at += common_length(ids[at:], after.tokens)
            if at < after.end:
                break
            node = after
        return path, at

    def restore(
        self,
        text: np.ndarray,
        parent: Node | None,
        rows: Arrays,
        kept: Arrays | None,
        used: int,
    ) -> Node | None:
        """Adds a node with the arrays of a file, without copying them.

        Args:
          text: [n] int32. All tokens up to the end of the node.
          parent: the node before it, or None for the root.
          rows, kept, used: see `Node`.

        Returns:
          The node, or None if the tree has one that begins with the same token.
        """
        parent = self._root if parent is None else parent
        first = int(text[parent.end])
        if first in parent.children:
            return None
        node = Node(text[parent.end :], parent.end, rows, parent, kept=kept, used=used)
        parent.children[first] = node
        self.bytes += node.run_bytes + node.kept_bytes
        self._states += kept is not None
        self._now = max(self._now, used)
        return node

    def prune(self) -> None:
        """Removes all nodes after which there is no kept state."""
        while lost := [n for n in self.nodes() if n.kept is None and not n.children]:
            for node in lost:
                self.drop(node)

    def _grown(self, node: Node, ids: np.ndarray) -> Node:
        """Returns a new leaf after a node, with the rest of a text."""
        rows = tuple(
            np.zeros(
                [0 if i == place.axis else n for i, n in enumerate(place.shape)],
                place.dtype,
            )
            for place in (self.form.places[i] for i in self.form.caches)
        )
        leaf = Node(ids[node.end :].copy(), node.end, rows, node)
        node.children[int(leaf.tokens[0])] = leaf
        self.bytes += leaf.run_bytes
        return leaf

    def _fill(self, node: Node, start: int, caches: Arrays, read: list[int]) -> None:
        """Copies rows to a node that are missing there.

        Args:
          node: the node.
          start, caches: as in `insert`.
          read: number of tokens whose rows each cache has.
        """
        rows, before = list(node.rows), node.run_bytes
        for j, x in enumerate(caches):
            have = rows[j].shape[self.form.axis(j)]
            want = min(read[j], node.end) - node.start
            first = node.start + have - start
            if want <= have or first < 0:
                continue
            new = self.form.rows(j, x, first, first + want - have)
            rows[j] = np.concatenate([rows[j], new], self.form.axis(j))
        node.rows = tuple(rows)
        if node.run_bytes != before:
            self.bytes += node.run_bytes - before
            self.on_change(node, False)

    def _split(self, node: Node, size: int) -> Node:
        """Splits a node after some of its tokens. Returns the first part."""
        assert node.parent is not None  # the root has no tokens
        before = node.run_bytes
        rows = node.rows
        first = Node(
            node.tokens[:size].copy(),
            node.start,
            tuple(self.form.rows(j, x, 0, size) for j, x in enumerate(rows)),
            node.parent,
            used=node.used,
        )
        node.parent.children[int(first.tokens[0])] = first
        node.tokens, node.start, node.parent = (
            node.tokens[size:].copy(),
            first.end,
            first,
        )
        node.rows = tuple(
            self.form.rows(j, x, size, x.shape[self.form.axis(j)])
            for j, x in enumerate(rows)
        )
        first.children[int(node.tokens[0])] = node
        self.bytes += first.run_bytes + node.run_bytes - before
        self.on_change(first, False)
        self.on_change(node, False)
        return first

    def evict(self, newest: Node | None = None) -> None:
        """Evicts states until all fit in the limit, `newest` last."""
        while self.bytes > self.limit and self._root.children:
            states = [n for n in self.nodes() if n.kept is not None and n is not newest]
            if self.cuts:  # states in the middle of a text take no space
                states = [n for n in states if not n.children]
            worst = min(states, key=self._worth, default=newest)
            if worst is None:
                break
            self.remove(worst)

    def _worth(self, node: Node) -> float:
        """Returns the tokens of prefill that a kept state saves for each of its bytes,
        weighted by its use."""
        if node.children:
            size, before = node.kept_bytes, node.kept_before()
        else:
            first = node.first_left()
            left = node.path()[len(first.path()) - 1 :]
            size = node.kept_bytes + sum(one.run_bytes for one in left)
            before = first.start if self.cuts else node.kept_before()
        age = 1 + self._now - node.used
        return (1 + node.hits) * (node.end - before) / (max(size, 1) * age)

    def remove(self, node: Node) -> None:
        """Removes the kept state at a node, and all nodes that are of no use without
        it."""
        self.bytes -= node.kept_bytes
        self._states -= node.kept is not None
        node.kept = None
        if node.children:
            self.on_change(node, False)
        else:
            self.drop(node)

    def drop(self, node: Node) -> None:
        """Removes a node and all nodes after it, and those before it that are of no use
        then."""
        node = node.first_left()
        assert node.parent is not None  # the root stays
        del node.parent.children[int(node.tokens[0])]
        for one in node.descendants():
            self.bytes -= one.run_bytes + one.kept_bytes
            self._states -= one.kept is not None
            self.on_change(one, True)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of equal tokens at the beginning of two texts."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
