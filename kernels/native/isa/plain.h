// Vectors in terms that every compiler has: for processors without a file here, and for what those files leave out.
namespace {
namespace plain {

vu halves_at(const void* p) {  // L numbers of 2 bytes
    typedef uint16_t half_vector __attribute__((vector_size(L * 2)));
    return __builtin_convertvector(load_as<half_vector>(p), vu);
}
vu bytes_at(const uint8_t* p) {  // L bytes
    typedef uint8_t some __attribute__((vector_size(L)));
    return __builtin_convertvector(load_as<some>(p), vu);
}
vu two_words(uint32_t a, uint32_t) { return vu{} + a; }  // the second word is for numbers from the ninth on
void keep(vf&) {}  // keeps it in a register: gcc would read it again for each product, and a processor reads two at a
                   // time
void store(bf16* p, vf x) {  // to nearest, ties to even
    vu u = (vu)x, rounded = (u + (0x7fff + ((u >> 16) & 1))) >> 16;
    for (int i = 0; i < L; i++) p[i].bits = x[i] != x[i] ? 0x7fc0 : (uint16_t)rounded[i];
}
bool any(vi mask) { return largest(-mask) != 0; }  // whether a comparison holds for any number

// Number i of the result is the sum over x[i]. x is used up.
vf sums(vf* x) {
    vf y;
    for (int i = 0; i < L; i++) y[i] = sum(x[i]);
    return y;
}

// ---- fp16 ----

vf halves(const uint16_t* p) { return half_to_float(halves_at(p)); }  // L numbers
vf halves(Sixteen x, int part) {                                      // L of them
    uint16_t h[16];
    std::memcpy(h, &x, sizeof h);
    return halves(h + part * L);
}
float half_to_float(uint16_t h) { return ::half_to_float(vu{h})[0]; }
uint16_t to_half(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, f = bits & 0x7fffffff;
    if (f > 0x7f800000) return sign | 0x7e00;
    if (f >= 0x477ff000) return sign | 0x7c00;
    if (f < 0x38800000) {  // subnormal: the sum rounds as needed
        float y;
        std::memcpy(&y, &f, 4);
        y += 0.5f;
        std::memcpy(&f, &y, 4);
        return sign | (f - 0x3f000000);
    }
    return sign | ((f + 0xc8000fff + (f >> 13 & 1)) >> 13);
}

// ---- codes ----

template <int BITS> vf low_bits(vu x) {  // the lowest bits of each lane, as a number
    return __builtin_convertvector((vi)(x & ((1u << BITS) - 1)), vf);
}
vf coded(vu x, vf table) {  // the table entry of the lowest four bits; entries rise by one
    return __builtin_convertvector((vi)(x & 15), vf) + table[0];
}
vf looked_up(vu x, const vf* table) {  // the table entry of the lowest four bits
    float entries[ENTRIES];
    std::memcpy(entries, table, sizeof entries);
    vf y;
    for (int i = 0; i < L; i++) y[i] = entries[x[i] & (ENTRIES - 1)];
    return y;
}
vi zeros_at(const uint8_t* p, int v) {  // codes of 4 bits, a byte those of two rows 8 apart: of vector v of 16 rows
    const vu two = bytes_at(p);
    return (vi)(v ? two >> 4 : two & 15);
}

// ---- numbers of 16 bits ----

template <int BITS> Sixteen two_codes_at(const uint8_t* p) {  // 32 codes, two a lane: the second one above the first
    Sixteen x;
    for (int j = 0; j < 16; j++) {
        if constexpr (BITS == 8) x[j] = load_as<int16_t>(p + 2 * j);
        else x[j] = p[j * BITS / 4] >> (j * BITS * 2 % 8);
    }
    return x;
}
vf load(const int16_t* p) { return __builtin_convertvector((vi)(halves_at(p) << 16) >> 16, vf); }
struct Table {  // entries for codes of four bits
    int16_t entries[ENTRIES];
    Table(const int16_t* from) { std::copy_n(from, ENTRIES, entries); }
    void look_up(Sixteen* two) const {
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 16; j++) two[i][j] = entries[two[i][j]];
    }
};
Sixteen rounded_product(Sixteen a, Sixteen b) {  // / 2^15
    for (int j = 0; j < 16; j++) a[j] = (int16_t)((a[j] * b[j] + (1 << 14)) >> 15);
    return a;
}

typedef int16_t Halves __attribute__((vector_size(L * 4)));

void keep(Halves&) {}
vi add_dots(vi sum, Halves a, Halves b) {  // products of two neighbours a lane
    const vi x = (vi)a, y = (vi)b;
    return sum + (x >> 16) * (y >> 16) + (x << 16 >> 16) * (y << 16 >> 16);
}
Halves narrowed_in_order(vi a, vi b) {
    Halves y;
    for (int j = 0; j < L; j++) y[j] = (int16_t)a[j], y[L + j] = (int16_t)b[j];
    return y;
}
vi rounded_numbers(vf x) {
    vi y;
    for (int j = 0; j < L; j++) y[j] = (int32_t)std::nearbyint(x[j]);
    return y;
}
void interleave(Halves a, Halves b, Halves* to) {  // pairs of a number of either: by fours of pairs in turns
    for (int j = 0; j < 2 * L; j++) {
        Halves& half = to[j % 8 / 4];
        half[j / 8 * 8 + j % 4 * 2] = a[j], half[j / 8 * 8 + j % 4 * 2 + 1] = b[j];
    }
}

// ---- scores by look-up ----

constexpr int LOOKED_UP = 2;

// What each of a word's eight 4-bit codes adds to a token's score, for LOOKED_UP * L tokens at once: tables are
// prepared once for all tokens of a work item.
struct Tables {
    const float* entries;
    Tables(const float* entries, int64_t) : entries(entries) {}

    void add_entries(int64_t word, const uint32_t* words, vf* score) const {
        vu one = load_as<vu>(words), two = load_as<vu>(words + L);
        for (int c = 0; c < 8; c++) {
            const float* table = entries + (word * 8 + c) * ENTRIES;
            for (int j = 0; j < L; j++)
                score[0][j] += table[one[j] >> (4 * c) & 15], score[1][j] += table[two[j] >> (4 * c) & 15];
        }
    }
};

void transpose2(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 2] words -> [2, L], `row` apart
    vu x = load_as<vu>(from), y = load_as<vu>(from + sizeof x);
    vu first = two_of(x, y, 2 * LANE), second = two_of(x, y, 2 * LANE + 1);
    std::memcpy(to, &first, sizeof first), std::memcpy(to + row, &second, sizeof second);
}

void transpose4(const uint8_t* from, uint32_t* to, int64_t row) {  // [L, 4] words -> [4, L]
    constexpr int HALF = L / 2;
    const vi upper = LANE / HALF, rest = LANE % HALF;
    vu x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = load_as<vu>(from + i * sizeof x[0]);  // L / 4 tokens each
    for (int i = 0; i < 4; i += 2)  // half of the tokens' words 0 and 1, or 2 and 3
        for (int j = 0; j < 2; j++) y[i + j] = two_of(x[i], x[i + 1], 4 * rest + upper + 2 * j);
    for (int i = 0; i < 2; i++) {
        vu first = two_of(y[i], y[i + 2], upper * L + rest), second = two_of(y[i], y[i + 2], upper * L + rest + HALF);
        std::memcpy(to + 2 * i * row, &first, sizeof first),
            std::memcpy(to + (2 * i + 1) * row, &second, sizeof second);
    }
}

// ---- selection ----

// Places of the numbers x for which keep(x), in order, among those of n that fill whole vectors. Returns their number;
// i becomes the first place that was not checked.
template <class Keep> int64_t whole_places(const int32_t*, int64_t, int64_t& i, int32_t*, Keep) { return i = 0; }

// ---- products ----

bool multiplies_one_row() { return true; }  // faster than torch

}  // namespace plain
}  // namespace
