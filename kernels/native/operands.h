// The arguments of kernels: tensors as pointers to their numbers, and strides in numbers. operators.cpp makes them.
#pragma once
#include "vectors.h"

namespace {

// Queries [B, H * G, D], G heads for each head of a cache, and their outputs. Channels are contiguous
template <class T> struct Heads {
    const T* q = nullptr;  // or null, if an attention makes its own
    int64_t row = 0, head = 0;
    T* out;  // [B, H * G, D], contiguous
    int64_t B, H, G, D, threads;

    const T* of(int64_t b, int64_t h) const { return q + b * row + h * G * head; }
};

// [B, H, n, contiguous numbers], such as a cache of n slots
template <class T> struct Cache {
    const T* at;
    int64_t row, head, slot;

    const T* of(int64_t b, int64_t h) const { return at + b * row + h * head; }
};

// Numbers for each head, or for each row of the batch if `head` is 0; the numbers of a head are contiguous
template <class T> struct PerHead {
    T* at;
    int64_t row, head;

    explicit operator bool() const { return at; }
    T* of(int64_t b, int64_t h) const { return at + b * row + h * head; }
};

// Slots idx[0..count); there is room for K
struct List {
    PerHead<const int64_t> idx, count;
    int64_t K;
};

}  // namespace
