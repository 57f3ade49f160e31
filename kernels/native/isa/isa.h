// The instruction sets this is compiled for. Only this file asks the compiler; kernels and the other files of this
// folder use these constants.
#pragma once

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVX512 true
#else
#define AVX512 false
#endif
#if !AVX512 && defined(__AVX2__) && defined(__F16C__)
#define AVX2 true
#else
#define AVX2 false
#endif
#if (AVX512 && defined(__AVX512VNNI__)) || (AVX2 && defined(__AVXVNNI__))
#define VNNI true
#else
#define VNNI false
#endif
#if AVX512 && defined(__AVX512BF16__)
#define PAIRS true  // of bf16
#else
#define PAIRS false
#endif
#if PAIRS && defined(__AMX_BF16__)
#define TILES true  // of bf16; no processor has them without the above
#else
#define TILES false
#endif
#if PAIRS && !defined(__AVXVNNI__)
#define ZEN_4 true  // has BF16, but not yet the narrow VNNI
#else
#define ZEN_4 false
#endif
