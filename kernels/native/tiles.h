// The processor's matrix unit for bf16: eight registers of 16 rows of 64 bytes.
#pragma once
#include <cstdint>
#include <vector>
#include "vectors.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)  // no processor has the first alone
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Room for n numbers, in whole vectors: a row that lies across two lines of the cache costs twice.
template <class T> struct Room {
    std::vector<vf> lines;
    T* at;
    Room(int64_t n) : lines((n * sizeof(T) + sizeof(vf) - 1) / sizeof(vf)), at((T*)lines.data()) {}
    T& operator[](int64_t i) { return at[i]; }
};

#ifdef __AMX_BF16__
// The system gives the unit's registers to those who ask (ARCH_REQ_XCOMP_PERM).
bool has_tiles() {
    static const bool given = !syscall(SYS_arch_prctl, 0x1023, 18);
    return given;
}

struct Tiles {  // a thread's registers, all of their whole size, while this lives
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } all;
        for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = 16;
        _tile_loadconfig(&all);
    }
    ~Tiles() { _tile_release(); }
};
#else
bool has_tiles() { return false; }
#endif

}  // namespace
