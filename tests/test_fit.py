"""Test the search of `sizing.fit`, with a task whose sizes are plain numbers."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stree_jax.sizing.fit import TRIES, Count, Task, fastest, largest


@dataclass(frozen=True)
class Asked:
    rows: int
    width: int


@dataclass
class Toy(Task[Asked, int]):
    """A task in which a candidate is its bytes for each of rows x width. 1 is the
    smallest.

    Attributes:
      more: bytes that the compiler adds to the prediction, by candidate.
      asked: candidates that were compiled.
    """

    ways: list[int]
    more: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def least(self, request):
        return self.ways[self.ways.index(1)]

    def candidates(self, request):
        return self.ways

    def count(self, request, candidate):
        size = candidate * request.rows * request.width
        return Count(size, size, {"all": size})

    def compiled(self, request, candidate):
        self.asked.append(candidate)
        yield self.count(request, candidate).predicted + self.more.get(candidate, 0)

    def numbers(self, request):
        return {"width": (2, request.width), "rows": (1, request.rows)}


def test_the_first_candidate_that_fits():
    task = Toy([9, 5, 3, 1, 2])
    (found,) = fastest(task, [Asked(10, 10)], 500)
    assert (found.candidate, found.size) == (5, 500)
    assert task.asked == [5], "more than the tolerance beyond the limit"
    several = fastest(Toy([9, 5, 3, 1, 2]), [Asked(10, 10)], 500, count=3)
    assert [one.candidate for one in several] == [5, 3, 1]


def test_the_compilers_sizes_decide():
    task = Toy([5, 3, 1], {5: 1, 3: 300})
    (found,) = fastest(task, [Asked(10, 10)], 500)
    assert task.asked == [5, 3, 1] and found.candidate == 1


def test_few_candidates_are_compiled_before_the_smallest():
    ways = list(range(20, 0, -1))
    task = Toy(ways, dict.fromkeys(ways[:-1], 10**6))
    (found,) = fastest(task, [Asked(1, 2)], 1000)
    assert task.asked == [*ways[:TRIES], 1] and found.candidate == 1


def test_the_first_request_that_fits():
    wishes = [Asked(10, 10), Asked(5, 10), Asked(2, 2)]
    (found,) = fastest(Toy([3, 1]), wishes, 60)
    assert (found.request, found.candidate) == (wishes[1], 1)


@given(st.integers(1, 40), st.integers(2, 40), st.integers(1, 1500))
def test_suggested_numbers_fit(rows, width, limit):
    request, task = Asked(rows, width), Toy([1])
    if rows * width <= limit:
        assert fastest(task, [request], limit)
        return
    with pytest.raises(ValueError, match="^memory: .* too few for ") as error:
        fastest(task, [request], limit)
    text = str(error.value)
    assert "\n" not in text and ("it fits with" in text) == (limit >= 2)
    if limit < 2:
        assert "the shortest request takes" in text
        return
    advice = text.split("it fits with ")[1]
    groups = [advice.split(" and ")] if " and " in advice else None
    for words in groups or [[word] for word in advice.split(", or ")]:
        less = request
        for word in words:
            name, value = word.split()
            less = task.lowered(less, name, int(value))
        assert less.rows * less.width <= limit < rows * width


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_largest_that_fits(low, high, most):
    low, high = sorted((low, high))
    found = largest(low, high, lambda n: n <= most)
    if most < low:
        assert found is None
    else:
        assert low <= found <= min(most, high)
        assert found >= min(most, high) - max(1, found // 64)
