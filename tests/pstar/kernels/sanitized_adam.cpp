// The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: every layout, gradient, path, odd sizes and odd
// addresses, in buffers that end exactly where the arrays end. Prints how many updates ran; a fault ends the program.
#include "cpu_adam.cpp"

#include <cstdio>
#include <memory>
#include <vector>

// `count` elements that begin `shift` elements after an aligned address, and nothing beyond them.
template <class T> struct Array {
    std::unique_ptr<char[]> memory;
    T *at;
    Array(pstar_i64 count, int shift) : memory(new char[(count + shift) * sizeof(T)]()), at((T *)memory.get() + shift) {}
};

int main() {
    std::vector<float> values(256), bounds(256, INFINITY);
    for (int k = 0; k < 256; k++) values[k] = (k - 127) / 128.0f;
    for (int k = 0; k < 255; k++) bounds[k] = (k - 126.5f) / 128.0f;
    std::vector<pstar_u8> least(65536, 255);
    const Codes codes = {values.data(), bounds.data(), values.data(), bounds.data(), least.data(), least.data()};
    const float odd[] = {0.0f, -1.0f, 1e-45f, 3e38f, -3e38f, INFINITY, NAN, 1.5f, 1e-20f, 65520.0f};
    int updates = 0;
    for (int path = PATH_PLAIN; path <= PATH_AVX512; path++)
        for (int param = PARAM_FP32; param <= PARAM_BF16_SR; param++)
            for (int grad = GRAD_FP32; grad <= GRAD_BF16; grad++)
                for (int quantised = 0; quantised < 2; quantised++)
                    for (pstar_i64 numel : {0, 1, 15, 257, 2049, 70001})
                        for (int shift = 0; shift < 3; shift += 2) {
                            if (!pstar_has_path(path)) continue;
                            const pstar_i64 blocks = (numel + PSTAR_QUANT_BLOCK - 1) / PSTAR_QUANT_BLOCK;
                            Array<float> x(numel, shift), g(numel, shift), m(numel, shift), v(numel, shift);
                            Array<float> m_scale(blocks, 0), v_scale(blocks, 0);
                            Array<pstar_u16> x16(numel, shift), g16(numel, shift), extra(numel, shift);
                            Array<pstar_u8> m8(numel, shift), v8(numel, shift);
                            for (pstar_i64 i = 0; i < numel; i++) {
                                x.at[i] = odd[i % 10], g.at[i] = odd[(i * 7 + 3) % 10];
                                x16.at[i] = (pstar_u16)(i * 2654435761u >> 7), g16.at[i] = (pstar_u16)(i * 40503u >> 3);
                                m8.at[i] = (pstar_u8)i, v8.at[i] = (pstar_u8)(i * 5);
                            }
                            AdamChunk c = {};
                            c.param = param >= PARAM_SPLIT ? (void *)x16.at : (void *)x.at;
                            if (param >= PARAM_COPY_BF16 && param <= PARAM_SPLIT) c.extra = extra.at;
                            c.grad = grad == GRAD_FP32 ? (void *)g.at : (void *)g16.at;
                            c.exp_avg = quantised ? (void *)m8.at : (void *)m.at;
                            c.exp_avg_sq = quantised ? (void *)v8.at : (void *)v.at;
                            c.exp_avg_scale = m_scale.at, c.exp_avg_sq_scale = v_scale.at;
                            c.numel = numel;
                            c.scalars = {-1e-4f, 0.1f, 0.1f, 0, 0.01f, 0, 3.0f, 1e-8f, -1e-2f, 0.5f};
                            double norm = 0;
                            if (pstar_adam(&c, 1, param, grad, quantised ? &codes : 0, 3, path)) return 1;
                            if (pstar_squared_norm(c.grad, 0, 0, 0, numel, grad, &norm, 3, path)) return 1;
                            for (int add = 0; add < 2; add++)
                                if (pstar_squared_norm(c.grad, x.at, add, 1, numel, grad, &norm, 3, path)) return 1;
                            void *place = grad == GRAD_FP32 ? (void *)x.at : (void *)x16.at;
                            if (pstar_squared_norm(c.grad, place, 0, 0, numel, grad, &norm, 3, path)) return 1;
                            updates++;
                        }
    printf("%d updates\n", updates);
    return 0;
}
