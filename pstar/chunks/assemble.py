"""Puts the engine's inside together, from the bottom up: what an object calls, it is given when it is made."""

import torch

from pstar.chunks.gradients import Gradients
from pstar.chunks.parameters import Parameters
from pstar.chunks.prefetch import Prefetch
from pstar.chunks.step import Chunks
from pstar.chunks.unit import Units
from pstar.chunks.unshard import Unsharding
from pstar.collective_log import CollectiveLog
from pstar.collectives import Collectives
from pstar.disk import DiskTier
from pstar.movers import Movers
from pstar.norms import ParameterNorms
from pstar.peak_watch import PeakWatch
from pstar.plan import Plan
from pstar.profile import Profile
from pstar.residency import Residency
from pstar.room import NearRoom
from pstar.schedule import Schedule
from pstar.tiers import FAR, Tier
from pstar.update_tiers import UpdateTiers


def assemble(plan: Plan, params: dict[str, torch.nn.Parameter], near: Tier, far: Tier, disk: DiskTier | None,
             movers: Movers, collectives: Collectives, watch: PeakWatch | None, profile: Profile | None,
             streamed: bool) -> Chunks:
    """The chunks of a model, all of them far and zero.

    Args:
        plan: sizes, dtypes and the configuration.
        params: qualified name to parameter, in the model's order; a tied parameter once.
        near, far, disk: the tiers.
        movers, collectives: what carries bytes between tiers, and between ranks.
        watch: measures activations; None where nobody wants to know.
        profile: records what comes and goes.
        streamed: every update is computed near.
    """
    config, layout, device = plan.config, plan.layout, near.device
    units = Units(layout, config.communication, collectives.num_ranks)
    schedule = Schedule(config.eviction_policy, units.uses_of, watch)
    parameters = Parameters(units, params, plan.param_dtype, device, schedule)
    residency = Residency(near, far, collectives.ledger, schedule, parameters, disk, movers, profile)
    tiers = UpdateTiers(layout, plan.near_homes, streamed)
    room = NearRoom(plan, near, tiers, watch)
    log = CollectiveLog(collectives, device)
    unsharding = Unsharding(parameters, residency, collectives, log)
    norms = ParameterNorms(layout, list(params), collectives, device)
    gradients = Gradients(parameters, residency, collectives, log, norms, tiers, plan.grad_dtype,
                          plan.accumulates, config.find_unused_parameters)
    prefetch = Prefetch(unsharding, residency, room, tiers, config.prefetch, plan.grad_dtype)
    for group in layout.groups:
        residency.create(("param", group.index), group.piece_elems, plan.param_dtype, FAR).zero_()
    return Chunks(parameters, gradients, unsharding, prefetch, room, tiers, residency, collectives)
