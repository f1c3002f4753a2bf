"""Which ranks share a node, and how many bytes cross the network between nodes. Numbers only."""

from collections.abc import Sequence


def ranks_by_node(names: Sequence[str]) -> list[list[int]] | None:
    """The ranks of each node, ascending; nodes in the order of their first ranks. None if nodes have unequal numbers.

    Args:
        names: of each rank's node, by rank. Ranks of a node need not be consecutive.
    """
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values()) if len({len(ranks) for ranks in nodes.values()}) == 1 else None


def sent_in_two_levels(num_nodes: int, gathered_bytes: float, reduced_bytes: float, summed_bytes: float = 0) -> float:
    """Bytes that each node sends to other nodes in two levels (pstar.comm.two_levels).

    A node has 1 / n of the pieces and sends each of them once to each other node. To each it also sends its sum of their
    pieces, and its own part of small sums such as norms, whole.

    Args:
        num_nodes: n.
        gathered_bytes, reduced_bytes: of whole units, the pieces of all ranks together, each as often as it is gathered or
            reduced.
        summed_bytes: of small tensors that all ranks sum.
    """
    return (num_nodes - 1) / num_nodes * (gathered_bytes + reduced_bytes) + (num_nodes - 1) * summed_bytes


def sent_by_replicas(num_nodes: int, reduced_bytes: float, summed_bytes: float = 0) -> float:
    """Bytes that each node sends to other nodes if each node has all chunks (pstar.comm.replicas): gathers stay inside.

    An all-reduce: a node sends the n-th part of its sums to each other node, and then the part that it has added up.

    Args:
        num_nodes: n.
        reduced_bytes: of whole units, the pieces of a node's ranks together, each as often as it is reduced.
        summed_bytes: of small tensors that all ranks sum.
    """
    return (num_nodes - 1) / num_nodes * 2 * reduced_bytes + (num_nodes - 1) * summed_bytes


def sent_by_flat_ring(num_ranks: int, gathered_bytes: float, reduced_bytes: float, summed_bytes: float = 0) -> float:
    """Bytes that each node sends to the next node in gloo's ring of p ranks, numbered node by node.

    In a ring one rank of a node sends to another node: (p - 1) / p of each gathered unit, and twice that of what is reduced
    or summed, because gloo's reduce-scatter is an all-reduce. It is the same for all numbers of ranks on a node.
    """
    return (num_ranks - 1) / num_ranks * (gathered_bytes + 2 * (reduced_bytes + summed_bytes))
