"""Weights in few bits, from first principles: int8, int4, NF4, GPTQ, and files for llama.cpp.

    code_books.py         the values of 4-bit codes: equal steps, or equal probabilities
    blockwise.py          int4 and NF4 in blocks, double quantisation           QLoRA, Dettmers et al. 2023
    int8.py               a scale a row and a column, outliers in 16 bit        LLM.int8(), Dettmers et al. 2022
    calibration.py        what the inputs of layers look like on some text
    gptq.py               rounding that looks at the output's error             GPTQ, Frantar et al. 2022
    quantized_linear.py   the layer that computes with codes, and passes gradients through
    whole_model.py        quantize_model(), weight_bytes()
    ggml_blocks.py        Q8_0 and Q4_0
    gguf_vocabulary.py    the vocabulary for llama.cpp
    gguf.py               write_gguf()
    planted_outliers.py   a small model with a large model's outliers, for experiments

Each file imports only from files above it. Usage:

    quantize_model(model, bits=4)                       # NF4 with double quantisation, in place
    quantize_model(model, bits=8)                       # LLM.int8()
    quantize_model(model, bits=4, kind="int4", calibration=batches, by_gptq=True)
    weight_bytes(model)                                 # codes, scales and plain weights
"""

from quantize.blockwise import bits_with_scales
from quantize.quantized_linear import QuantizedConv1D
from quantize.whole_model import bits_per_weight, block_layers, quantize_model, weight_bytes

__all__ = ["QuantizedConv1D", "bits_per_weight", "bits_with_scales", "block_layers", "quantize_model", "weight_bytes"]
