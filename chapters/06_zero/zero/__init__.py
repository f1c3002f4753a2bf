"""ZeRO (Rajbhandari et al. 2020): data parallelism that shards the states of which one copy suffices.

    bytes a parameter, of Ψ parameters, on each of p ranks   16 bit                    fp32
    stage 0   everything on each rank (ch. 04)               2 + 2 + 12                4 + 4 + 8
    stage 1   optimizer states sharded        (P_os)         2 + 2 + 12/p              4 + 4 + 8/p
    stage 2   and gradients                   (P_os+g)       2 + 2/p + 12/p            4 + 4/p + 8/p
    stage 3   and parameters                  (P_os+g+p)     2/p + 2/p + 12/p          4/p + 4/p + 8/p

In 16 bit: 2 for parameters, 2 for gradients, 12 for fp32 masters and two moments. In fp32 the parameters are the masters.

    a step:   backward | reduce-scatter | clip | Adam on my shard | all-gather of the new parameters

An all-reduce is a reduce-scatter and then an all-gather, so stages 1 and 2 send no more than stage 0: 2Ψ. They update
between the two halves. Stage 1 reduces all gradients after backward; stage 2 reduces and frees them in backward, block by
block. Stages 0 and 1 sum gradients over micro-batches before they reduce; 2 and 3 reduce each, to keep only a shard.

Each file imports only from files above it:

    comm.py            three collectives, and the bytes that they send        ledger.py       bytes of model states
    units.py           parameters, cut into shards                            loss_scaler.py  fp16
    offload.py         states in host memory                                  checkpoint.py   this rank's pieces on disk
    end_of_backward.py calls a function when no gradient will follow
    sharded.py         what all stages share: units, reductions in backward, the update, checkpoints
    stages012.py       every rank computes with whole parameters              stage3.py       gathers a block before use
    torch_backend.py   the same with torch's ZeroRedundancyOptimizer and FSDP2
    backends.py        shard(), which chooses a class for the stage

Usage:

    sharded, scaler = shard(model, ranks, settings)      # the model now computes in --precision
    optimizer = sharded.make_optimizer(settings)         # AdamW of this rank's pieces
    with sharded.no_sync(not_the_last_micro_batch):
        scaler.scale(sharded(inputs, targets)).backward()
    sharded.wait()                                       # now this rank's pieces have mean gradients
    scaler.unscale_(optimizer); sharded.clip_gradients(1.0); scaler.step(optimizer); scaler.update()
"""

from zero.backends import shard

__all__ = ["shard"]
