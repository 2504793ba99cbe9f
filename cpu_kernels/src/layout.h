// Places arrays one after another in a block of memory. Include after product_body.h.

struct Layout {
  char* base;
  int64_t at = 0;
  template <class E>
  TARGET void place(E** array, int64_t count) {
    *array = reinterpret_cast<E*>(base + at);
    at += rounded_up(count * static_cast<int64_t>(sizeof(E)), 64);
  }
};
