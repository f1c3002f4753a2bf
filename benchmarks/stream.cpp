// Kernels that move the bytes of an Adam update with almost no arithmetic: the speed that memory bandwidth allows.
// Compiled and loaded by benchmarks/adam.py for this machine (-O3 -march=native -fopenmp).

extern "C" void stream_fp32(long n, float *p, const float *g, float *m, float *v, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) {
        p[i] += g[i];
        m[i] += g[i];
        v[i] += g[i];
    }
}

// 16-bit gradient in, 16-bit copy of the parameter out.
extern "C" void stream_separate(long n, float *p, const short *g, float *m, float *v, short *copy, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) {
        float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
        copy[i] = g[i];
    }
}

// The 16-bit copy overwrites the gradient.
extern "C" void stream_shared(long n, float *p, short *g, float *m, float *v, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) {
        float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
        g[i] += 1;
    }
}

extern "C" void stream_split(long n, short *high, short *low, const short *g, float *m, float *v, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) {
        float x = g[i];
        high[i] += g[i];
        low[i] += g[i];
        m[i] += x;
        v[i] += x;
    }
}
