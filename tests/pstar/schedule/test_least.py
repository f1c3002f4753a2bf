"""The fewest bytes to and from disk, against a search of all ways to evict."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pstar.schedule.least import Use, least_read_bytes, least_written_bytes, read_bytes


def training(num_groups: int, kinds: tuple[str, ...] = ("moments",)) -> list[Use]:
    """Forward, backward and the updates of so many groups, which need more and more room from backward on."""
    groups = range(num_groups)
    forward = [Use(frozenset({("param", group)})) for group in groups]
    backward = [Use(frozenset({("param", group), ("grad", group)})) for group in reversed(groups)]
    updates = [Use(frozenset((kind, group) for kind in ("param", "grad", *kinds)), frozenset({("grad", group)}))
               for group in groups]
    return forward + backward + updates


def searched(uses: list[Use], sizes: dict, room: int, num_steps: int) -> int:
    """The fewest bytes read in num_steps, by trying every set of whole blocks that may stay at every moment."""
    reached = {(frozenset(), frozenset()): 0}    # (blocks in memory, blocks that exist) -> fewest bytes read so far
    for use in uses * num_steps:
        found: dict = {}
        for (held, exist), count in reached.items():
            count += sum(sizes[key] for key in (use.needs & exist) - held)
            others = held - use.needs
            for number in range(len(others) + 1):
                for stay in map(frozenset, combinations(others, number)):
                    if sum(sizes[key] for key in stay | use.needs) <= room:
                        state = (stay | use.needs) - use.drops, (exist | use.needs) - use.drops
                        found[state] = min(found.get(state, count), count)
        reached = found
    return min(reached.values())


@pytest.mark.parametrize("num_groups, room", [(2, 3), (2, 4), (2, 5), (3, 4), (3, 6), (3, 8)])
def test_blocks_of_one_byte_as_a_search_finds(num_groups, room):
    uses = training(num_groups)
    sizes = dict.fromkeys(frozenset().union(*(use.needs for use in uses)), 1)
    for num_steps in (1, 2, 4):
        assert sum(read_bytes(uses, sizes, room, num_steps)) == searched(uses, sizes, room, num_steps)


uses_of_few = st.lists(st.frozensets(st.sampled_from("abcd"), min_size=1, max_size=2), min_size=2, max_size=6)


@given(uses_of_few, st.fixed_dictionaries({key: st.integers(1, 3) for key in "abcd"}), st.integers(6, 9))
def test_any_order_of_blocks_of_several_bytes(needs, sizes, room):
    """Byte for byte as the search finds it; whole blocks may need more."""
    uses = [Use(keys) for keys in needs]
    least = sum(read_bytes(uses, sizes, room, 3))
    single = [Use(frozenset((key, byte) for key in use.needs for byte in range(sizes[key]))) for use in uses]
    if sum(sizes[key] for key in frozenset().union(*needs)) <= 7:
        bytes_of_one = dict.fromkeys(frozenset().union(*(use.needs for use in single)), 1)
        assert least == searched(single, bytes_of_one, room, 3)
    assert least <= searched(uses, sizes, room, 3)


def test_what_does_not_fit_at_the_peak_is_read_and_written_once():
    uses = training(26, ("exp_avg", "exp_avg_sq"))
    sizes = dict.fromkeys(frozenset().union(*(use.needs for use in uses)), 7)
    assert least_read_bytes(uses, sizes, 39 * 7) == least_written_bytes(uses, sizes, 39 * 7) == (104 - 39) * 7
    assert least_read_bytes(uses, sizes, 104 * 7) == least_written_bytes(uses, sizes, 104 * 7) == 0


def test_parameters_that_exceed_the_room_are_read_in_each_pass():
    uses = training(4, ("exp_avg", "exp_avg_sq"))
    sizes = dict.fromkeys(frozenset().union(*(use.needs for use in uses)), 1)
    assert least_read_bytes(uses, sizes, 4) > least_written_bytes(uses, sizes, 4) == 12
    with pytest.raises(ValueError, match="exceed the room of 3 bytes"):
        least_read_bytes(uses, sizes, 3)
