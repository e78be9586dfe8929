"""C++ around a rule's loop over quantised planes: runs of 64 elements are decoded to the stack,
updated and encoded, as `optim.rules.quantised` does it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from gemini.optim.rules.state_layout import GROUP_NUMEL, Plane, StateLayout
from gemini.units import PARAM_ALIGN_NUMEL

NUMBERS = 4  # of a row, behind its columns: seed, parameter, step, and its first element there

_NOISE = """\
static inline void state_noise(uint16_t* out, uint64_t seed, uint64_t param, uint64_t step,
                               uint64_t first, int64_t n) {  // Philox4x64-10
  for (int64_t i = 0; i < n; i += 16) {
    uint64_t c0 = (first + i) / 16 + 1, c1 = step, c2 = 0, c3 = 0, k0 = seed, k1 = param;
    for (int round = 0; round < 10; round++) {
      const unsigned __int128 low = (unsigned __int128)c0 * 0xD2E7470EE14C6C93ull;
      const unsigned __int128 high = (unsigned __int128)c2 * 0xCA5A826395121157ull;
      c0 = (uint64_t)(high >> 64) ^ c1 ^ k0; c1 = (uint64_t)high;
      c2 = (uint64_t)(low >> 64) ^ c3 ^ k1; c3 = (uint64_t)low;
      k0 += 0x9E3779B97F4A7C15ull; k1 += 0xBB67AE8584CAA73Bull;
    }
    const uint64_t words[] = {c0, c1, c2, c3};
    for (int j = 0; j < 16; j++) out[i + j] = (uint16_t)(words[j / 4] >> (16 * (j % 4)));
  }
}
"""
CODECS = """\
static inline uint32_t upper(float x, uint32_t up, int kept) {
  return ((bits_of(x) & 0x7FFFFFFF) + (up << (7 - kept))) >> (23 - kept);
}
static inline uint32_t other_bits(uint16_t random) { return (random & 0xFF) << 8 | random >> 8; }
struct Window { int32_t base, below; };
static inline Window window(const float* x, const uint16_t* random, bool other, int kept,
                            int octaves, int least, int64_t n) {
  int32_t top = 0, below = 255;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFF;
    const uint32_t up = other ? other_bits(random[i]) : random[i];
    const int32_t exponent = (int32_t)(upper(x[i], up, kept) >> kept);
    const bool live = bits > 0 && bits < 0x7F800000;
    top = std::max(top, live ? exponent : 0);
    below = std::min(below, live ? exponent : 255);
  }
  return {(std::max(top - octaves, least) + least - 1) & -least, below};
}
static inline void decode(float* x, const uint8_t* codes, const uint8_t* shared, const float*,
                          int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t of_group = shared[i / GROUP], kept = 2 + (of_group >> 7);
    const uint32_t bits = (codes[i] + ((of_group & 127) * 2 << kept)) << (23 - kept);
    x[i] = float_of(codes[i] == 0 ? 0 : codes[i] == 255 ? 0x7F800000
                    : codes[i] == 254 ? 0x7FC00000 : bits);
  }
}
static inline void encode(const float* all, uint8_t* codes, uint8_t* shared, const float*,
                          const uint16_t* random, int64_t num) {
  for (int64_t at = 0; at < num; at += GROUP, all += GROUP, codes += GROUP, random += GROUP) {
    const int64_t n = std::min(GROUP, num - at);
    const Window fine = window(all, random, false, 3, 30, 2, n);
    const Window coarse = window(all, random, false, 2, 62, 2, n);
    const bool is_fine = fine.below > fine.base;
    const int32_t base = is_fine ? fine.base : coarse.base, kept = is_fine ? 3 : 2;
    shared[at / GROUP] = (uint8_t)(fine.below == 255 ? 0 : base / 2 + 128 * is_fine);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = bits_of(all[i]) & 0x7FFFFFFF;
      const int32_t code = (int32_t)upper(all[i], random[i], kept) - (base << kept);
      const int32_t within = std::min(std::max(code, 1), 253);
      codes[i] = (uint8_t)(bits == 0 ? 0 : bits < 0x7F800000 ? within
                           : bits == 0x7F800000 ? 255 : 254);
    }
  }
}
static inline void decode(float* x, const int8_t* codes, const uint8_t* shared, const float*,
                          int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t size = (uint32_t)std::abs(codes[i]) + ((uint32_t)shared[i / GROUP] << 3);
    const float y = codes[i] == 0 ? 0.0f : float_of(codes[i] == -128 ? 0x7FC00000 : size << 20);
    x[i] = codes[i] < 0 ? -y : y;
  }
}
static inline void encode(const float* all, int8_t* codes, uint8_t* shared, const float*,
                          const uint16_t* random, int64_t num) {
  for (int64_t at = 0; at < num; at += GROUP, all += GROUP, codes += GROUP, random += GROUP) {
    const int64_t n = std::min(GROUP, num - at);
    const Window found = window(all, random, true, 3, 14, 1, n);
    shared[at / GROUP] = (uint8_t)(found.below == 255 ? 0 : found.base);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = bits_of(all[i]) & 0x7FFFFFFF;
      const int32_t code = (int32_t)upper(all[i], other_bits(random[i]), 3) - (found.base << 3);
      const int32_t within = bits == 0 ? 0 : std::min(std::max(code, 0), 127);
      codes[i] = (int8_t)(bits >= 0x7F800000 ? -128 : all[i] < 0.0f ? -within : within);
    }
  }
}
static inline void decode(float* x, const int8_t* codes, std::nullptr_t, const float* square,
                          int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float ratio = float_of((uint32_t)(std::abs(codes[i]) + 1968) << 19) - 0.0625f;
    const float y = (codes[i] < 0 ? -ratio : ratio) * sqrtf(square[i]);
    x[i] = codes[i] == 0 ? 0.0f : codes[i] == -128 ? float_of(0x7FC00000) : y;
  }
}
static inline void encode(const float* x, int8_t* codes, std::nullptr_t, const float* square,
                          const uint16_t* random, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float root = sqrtf(square[i]), size = fabsf(x[i]);
    const float ratio = (root > 0.0f ? size / root : size * 0.0f) + 0.0625f;
    const uint32_t bits = bits_of(ratio) & 0x7FFFFFFF;
    const int32_t code = (int32_t)upper(ratio, other_bits(random[i]), 4) - 1968;
    const int32_t within = bits < (1969u << 19) ? 0 : std::min(code, 127);
    codes[i] = (int8_t)(bits >= 0x7F800000 ? -128 : x[i] < 0.0f ? -within : within);
  }
}
static inline void decode(float* x, const uint16_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = widen_bf16(codes[i]);
}
static inline void encode(const float* x, uint16_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; i++) codes[i] = round_bf16(x[i]);
}
static inline void encode(const float* x, uint16_t* codes, const uint16_t* random, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    codes[i] = x[i] != x[i] ? 0x7FC0 : (uint16_t)((bits_of(x[i]) + random[i]) >> 16);
}

"""

_TYPES = {"int8": "int8_t", "uint8": "uint8_t", "bfloat16": "uint16_t", "float32": "float"}


def grouped_tile(tile: str, itemsizes: Sequence[int], layout: StateLayout) -> str:
    """Make a `tile` of `cpp_loops.library` over quantised planes from one over fp32 planes.

    tile: takes the columns of `itemsizes`, then the planes of `layout`, which has no master. The
    new one takes the same columns, the stored form of the planes, and `NUMBERS` numbers.
    """
    body = tile.replace("static void tile(", "static inline void body(")
    stored, count, given = layout.stored().planes, len(layout.planes), len(itemsizes)
    numbers = [f"(uint64_t)columns[{given + len(stored) + i}]" for i in range(NUMBERS)]
    seed, param, step, origin = numbers
    kept = [_address(given + i, plane) for i, plane in enumerate(stored)]
    shared = ["nullptr" if i is None else kept[i] for i in layout.shares]
    loop = import_module(f"gemini.optim.update.{layout.home}_loop")
    decodes, encodes = loop.calls(layout, kept, shared)
    moved = [f"columns[{i}] + {size} * at" for i, size in enumerate(itemsizes)]
    moved += [f"(int64_t)plane{i}" for i in range(count)]
    return "\n".join(
        [
            f"static const int64_t RUN = {PARAM_ALIGN_NUMEL}, GROUP = {GROUP_NUMEL};",
            _NOISE + loop.CODECS + body,
            "static void tile(const int64_t* columns, const float* scalars,",
            "                 int64_t first, int64_t n) {",
            f"  float {', '.join(f'plane{i}[RUN]' for i in range(count))};",
            "  uint16_t random[RUN];",
            "  for (int64_t at = first; at < first + n; at += RUN) {",
            "    const int64_t count = std::min(RUN, first + n - at);",
            f"    state_noise(random, {seed}, {param}, {step}, {origin} + at, count);",
            *(f"    {call}, count);" for call in decodes),
            f"    const int64_t own[] = {{{', '.join(moved)}}};",
            "    body(own, scalars, 0, count);",
            *(f"    {call}, count);" for call in encodes),
            "  }",
            "}",
            "",
        ]
    )


def _address(column: int, plane: Plane) -> str:
    """Address of an element `at`, or of what its group shares."""
    return f"({_TYPES[plane.dtype]}*)columns[{column}] + at / {plane.group}"


def calls(
    layout: StateLayout, codes: Sequence[str], shared: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Calls of `CODECS` up to their `count`, in order: that decode `plane0` and so on before an
    update, and that encode them behind it. codes, shared: addresses by plane."""
    decodes, encodes, keeper = list[str](), list[str](), "nullptr"
    for i in layout.coding_order:
        is_positive = layout.planes[i].keeps_ties
        if layout.kind == "bf16":
            decodes.append(f"decode(plane{i}, {codes[i]}")
            encodes.append(f"encode(plane{i}, {codes[i]}{', random' * is_positive}")
            continue
        decodes.append(f"decode(plane{i}, {codes[i]}, {shared[i]}, {keeper}")
        encodes.append(f"encode(plane{i}, {codes[i]}, {shared[i]}, {keeper}, random")
        if is_positive:  # of the others the roots are what it will be decoded to
            keeper = f"plane{i}"
            encodes.append(decodes[-1])
    return decodes, encodes
