"""Constructs the engine's objects from the bottom up: each constructor is given the objects that it calls."""

import torch

from pstar.chunks.gradients import Gradients
from pstar.chunks.kept_gradients import KeptGradients
from pstar.chunks.parameters import Parameters
from pstar.chunks.peak_watch import PeakWatch
from pstar.chunks.prefetch import Prefetch
from pstar.chunks.resident import ResidentSteps
from pstar.chunks.room import NearRoom
from pstar.chunks.step import Chunks
from pstar.chunks.unit import Units
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.comm.collective_log import CollectiveLog
from pstar.comm.collectives import Collectives
from pstar.kernels import BlockCodes
from pstar.memory.block_log import BlockLog
from pstar.memory.block_store import BlockStore
from pstar.memory.disk import DiskTier
from pstar.memory.links import Links
from pstar.memory.tier import FAR, Tier
from pstar.numerics.grad_norm import ParameterNorms
from pstar.planner.plan import Plan
from pstar.profile.recording import Profile
from pstar.schedule.schedule import Schedule


def assemble(plan: Plan, params: dict[str, torch.nn.Parameter], near: Tier, far: Tier, disk: DiskTier | None,
             links: Links, collectives: Collectives, watch: PeakWatch | None, profile: Profile | None,
             streamed: bool) -> Chunks:
    """The chunks of a model, all of them in far and filled with zeros.

    Args:
        plan: sizes, dtypes and the configuration.
        params: qualified name to parameter, in the model's order; a tied parameter once.
        near, far, disk: the tiers.
        links, collectives: copy bytes between tiers, and between ranks.
        watch: measures activations; None: they are not measured.
        profile: records copies and evictions.
        streamed: every update is computed in near.
    """
    config, layout, device = plan.config, plan.layout, near.device
    units = Units(layout, config.communication, collectives.num_ranks)
    schedule = Schedule(config.eviction_policy, units, watch)
    parameters = Parameters(units, params, plan.param_dtype, device, schedule)
    store = BlockStore(near, far, collectives.ledger, schedule, parameters, disk, links, profile)
    tiers = UpdateTiers(layout, plan.near_state_groups, streamed)
    room = NearRoom(plan, near, tiers, watch)
    log = CollectiveLog(collectives, device)
    unsharding = Unsharding(parameters, store, collectives, log)
    norms = ParameterNorms(layout, list(params), collectives, device)
    of_gradients = (parameters, store, collectives, log, norms, tiers, plan.grad_dtype, plan.accumulates,
                    config.find_unused_parameters)
    kept = KeptGradients(*of_gradients)
    gradients = kept if plan.keeps_gradients else Gradients(*of_gradients)
    update_log = None if plan.log_budget is None else BlockLog(store, plan.log_budget)
    num_keys = 0 if plan.stays_near else config.prefetch
    prefetch = Prefetch(unsharding, store, room, tiers, num_keys, plan.grad_dtype, update_log)
    codes = BlockCodes(config.frozen_bits) if plan.costs.in_codes else None
    for group in layout.groups:
        store.create(("param", group.index), group.piece_elems, plan.param_dtype, FAR, fixed=group.frozen,
                     codes=codes if group.coded else None).zero_()
    resident = ResidentSteps(plan, unsharding, store, tiers, kept)
    return Chunks(parameters, gradients, unsharding, prefetch, room, tiers, store, collectives, update_log, resident)
