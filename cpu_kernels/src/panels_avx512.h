// Vectors of AVX-512 for packed weights. Include inside a namespace, with TARGET defined.

constexpr int W = 16;

typedef uint16_t Bytes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

TARGET inline Floats halves(const void* from) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
TARGET inline __m128i sixteen(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
TARGET inline Floats unsigned_bytes(const void* from) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(from)));
}
TARGET inline Floats signed_bytes(const void* from) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(from)));
}
TARGET inline Bytes looked_up(const uint8_t (&table)[16], Bytes places) {
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen(table)), (__m512i)places);
}
TARGET inline Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
