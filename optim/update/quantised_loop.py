"""C++ around a rule's loop over quantised planes: groups of 64 elements are decoded to the stack,
updated and encoded, as `optim.rules.quantised` does it."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.optim.rules.state_layout import GROUP_NUMEL, Plane, StateLayout

NUMBERS = 4  # of a row, behind its columns: seed, parameter, step, and its first element there

_CODECS = """\
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
static inline float scale_of(const float* x, float least, int64_t n) {
  int32_t largest = 0;  // NaN is the largest of all as bits
  for (int64_t i = 0; i < n; i++)
    largest = std::max(largest, (int32_t)(bits_of(x[i]) & 0x7FFFFFFF));
  const float scale = float_of((uint32_t)largest);
  return scale < least ? 0.0f : scale;
}
static inline void decode(float* x, const int8_t* codes, const float* scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float y = (float)codes[i] / 127.0f;
    x[i] = y / (2.0f - fabsf(y)) * *scale;
  }
}
static inline void encode(const float* x, int8_t* codes, float* scale, const uint16_t*, int64_t n) {
  const float s = *scale = scale_of(x, 0x1p-100f, n);
  for (int64_t i = 0; i < n; i++) {
    const float z = s > 0.0f ? x[i] / s : 0.0f;
    const float code = floorf(127.0f * (2.0f * z / (1.0f + fabsf(z))) + 0.5f);
    codes[i] = (int8_t)(int32_t)(code == code ? code : 0.0f);
  }
}
static inline void decode(float* x, const uint8_t* codes, const float* scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float root = (float)codes[i] / 255.0f * *scale;
    x[i] = root * root;
  }
}
static inline void encode(const float* x, uint8_t* codes, float* scale, const uint16_t* random,
                          int64_t n) {
  float roots[GROUP];
  for (int64_t i = 0; i < n; i++) roots[i] = sqrtf(x[i]);
  const float s = *scale = scale_of(roots, 0x1p-52f, n);
  for (int64_t i = 0; i < n; i++) {
    const float z = s > 0.0f ? roots[i] / s : 0.0f;
    const float code = floorf(255.0f * z + (float)random[i] * 0x1p-16f);
    codes[i] = (uint8_t)(int32_t)(code == code ? code : 0.0f);
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

_TYPES = {"int8": "int8_t", "uint8": "uint8_t", "bfloat16": "uint16_t"}


def grouped_tile(tile: str, itemsizes: Sequence[int], layout: StateLayout) -> str:
    """Make a `tile` of `cpp_loops.library` over quantised planes from one over fp32 planes.

    tile: takes the columns of `itemsizes`, then the planes of `layout`, which has no master. The
    new one takes the same columns, the stored form of the planes, and `NUMBERS` numbers.
    """
    body = tile.replace("static void tile(", "static inline void body(")
    stored, count, given = layout.stored().planes, len(layout.planes), len(itemsizes)
    numbers = [f"(uint64_t)columns[{given + len(stored) + i}]" for i in range(NUMBERS)]
    seed, param, step, origin = numbers
    decodes, encodes = [], []
    for i, plane in enumerate(layout.planes):
        codes = _address(given + i, stored[i])
        scale = ""
        if len(stored) > count:
            scale = f", {_address(given + count + i, stored[count + i])}"
        random = ", random" if len(stored) > count or plane.keeps_ties else ""
        decodes.append(f"    decode(plane{i}, {codes}{scale}, count);")
        encodes.append(f"    encode(plane{i}, {codes}{scale}{random}, count);")
    moved = [f"columns[{i}] + {size} * at" for i, size in enumerate(itemsizes)]
    moved += [f"(int64_t)plane{i}" for i in range(count)]
    return "\n".join(
        [
            f"static const int64_t GROUP = {GROUP_NUMEL};",
            _CODECS + body,
            "static void tile(const int64_t* columns, const float* scalars,",
            "                 int64_t first, int64_t n) {",
            f"  float {', '.join(f'plane{i}[GROUP]' for i in range(count))};",
            "  uint16_t random[GROUP];",
            "  for (int64_t at = first; at < first + n; at += GROUP) {",
            "    const int64_t count = std::min(GROUP, first + n - at);",
            f"    state_noise(random, {seed}, {param}, {step}, {origin} + at, count);",
            *decodes,
            f"    const int64_t own[] = {{{', '.join(moved)}}};",
            "    body(own, scalars, 0, count);",
            *encodes,
            "  }",
            "}",
            "",
        ]
    )


def _address(column: int, plane: Plane) -> str:
    """Address of an element `at`, or of its group's scale."""
    if plane.group > 1:
        return f"(float*)columns[{column}] + at / GROUP"
    return f"({_TYPES[plane.dtype]}*)columns[{column}] + at"
