"""ZeRO (Rajbhandari et al. 2020): data parallelism that shards the states of which one copy suffices.

    bytes a parameter, of Ψ parameters, on each of p ranks   16 bit                    fp32
    stage 0   all of it everywhere (chapter 04)              2 + 2 + 12                4 + 4 + 8
    stage 1   optimizer states sharded        (P_os)         2 + 2 + 12/p              4 + 4 + 8/p
    stage 2   and gradients                   (P_os+g)       2 + 2/p + 12/p            4 + 4/p + 8/p
    stage 3   and parameters                  (P_os+g+p)     2/p + 2/p + 12/p          4/p + 4/p + 8/p

16 bit: parameters, gradients, and 12 for the fp32 masters with their two moments. In fp32 the parameters are the masters.

    a step:   backward | reduce-scatter | clip | Adam on my shard | all-gather of the new parameters

An all-reduce is a reduce-scatter and then an all-gather, so stages 1 and 2 send no more than stage 0: 2Ψ. They do the
update between the two halves. Stage 1 reduces at the end, when all gradients are there; stage 2 in backward, block by
block, and frees them. Of micro-batches stages 0 and 1 add up gradients on the rank; 2 and 3 reduce each, for lack of room.

The files, each of which imports from those above it only:

    comm.py            three collectives, and the bytes that they send        ledger.py       bytes of model states
    units.py           parameters cut into shards                             loss_scaler.py  fp16
    offload.py         states in host memory                                  checkpoint.py   this rank's pieces on disk
    end_of_backward.py calls a function when no gradient will follow
    sharded.py         what all stages share: units, reductions in backward, the update, checkpoints
    stages012.py       every rank computes with whole parameters              stage3.py       a block is gathered for its use
    torch_backend.py   the same by torch: ZeroRedundancyOptimizer, FSDP2
    backends.py        shard(), which chooses among them

Use:

    sharded, scaler = shard(model, ranks, settings)      # the model computes in --precision from here on
    optimizer = sharded.make_optimizer(settings)         # AdamW of this rank's pieces
    with sharded.no_sync(not_the_last_micro_batch):
        scaler.scale(sharded(inputs, targets)).backward()
    sharded.wait()                                       # now this rank's pieces have their mean gradients
    scaler.unscale_(optimizer); sharded.clip_gradients(1.0); scaler.step(optimizer); scaler.update()
"""

from zero.backends import shard

__all__ = ["shard"]
