// Products for which some instruction sets have instructions: of pairs of bf16, of tiles of them, of integers. The
// declarations here are defined in a file of isa/ if its instruction set is compiled for; otherwise nothing calls them.
#pragma once
#include "packed_weight.h"
#include "rows.h"
#include "shares.h"

namespace {

// How queries are multiplied with rows of T: bf16 may be multiplied in pairs
template <class T> struct QueriesFor {
    typedef Plain type;
};

// ---- keys that are coordinates in a basis (expanded.h) ----

constexpr int PANEL = L;                  // channels that are expanded at a time, of each half of a head
constexpr int64_t COORDINATES = 32;       // of a key, in a multiple of which 16-bit rows are padded with zeros
constexpr int BLOCK = L == 16 ? 64 : 48;  // tokens for which a basis is read from L2 once

// Products of a basis' channels, PANEL of each of two panels, with a block's coordinates, R of them, a multiple of
// Unit::TOGETHER: out [2 * PANEL, BLOCK]. A panel is packed from a basis whose rows, `step` apart, are its `rank`
// coordinates, or channels (then rank is a multiple of 32).
struct ByFloats;
struct ByPairs;
struct ByTiles;

// ---- packed weights ----

// Codes times M <= MOST rows of integers, added up; UNITS of inputs at a time, at most 4. A code is multiplied with
// both bytes of an integer, four at a time if the processor has an instruction for that (VNNI), otherwise two at a
// time.
template <int BITS, int M> struct ByFour;
template <int BITS, int M> struct ByTwo;
template <int BITS, int M> using Products = std::conditional_t<VNNI, ByFour<BITS, M>, ByTwo<BITS, M>>;
template <int BITS> constexpr bool BY_BYTES = VNNI || BITS == 4;
constexpr int MOST = VNNI ? L / 2 : L == 8 ? 2 : 8;

template <int BITS> int32_t* put_lanes(vi q, int64_t apart, int32_t* to);  // L integers in the layout of Products

// Many rows of x, for many_rows.cpp
template <int BITS, class T> void many_by_tiles(const Weight& w, const Product<T>& of);
template <class T> void many_by_pairs(const Weight& w, const Product<T>& of);  // W in bf16

}  // namespace

#if PAIRS
#include "isa/avx512_bf16.h"
#endif
#if TILES
#include "isa/amx.h"
#else
namespace {
bool has_tiles() { return false; }
}  // namespace
#endif
#if AVX2 || AVX512
#include "isa/integers.h"
#endif
#if VNNI
#include "isa/vnni.h"
#endif
