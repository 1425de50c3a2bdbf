// put_rows and add_rows write to some rows of a matrix, such as those of the placeholders of pictures.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/insert_rows.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// Calls f(to, from) for this thread's rows, as pointers to T.
template <class T, class F>
static void for_inserted_rows(const Tensor& x, const Tensor& rows, const Tensor& values, Team& team, const F& f) {
  const auto [first, last] = team.share(x.size[1] ? rows.size[0] : 0);  // without columns there may be no memory
  for (int64_t i = first; i < last; ++i) f(x.row<T>(rows.as<int64_t>()[i * rows.stride[0]]), values.row<T>(i));
}

TR_ENTRY(put_rows, Team& team, const Tensor& x, const Tensor& rows, const Tensor& values) {
  check_indices("put_rows_: rows", rows, x.size[0]);
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const size_t bytes = static_cast<size_t>(x.size[1]) * sizeof(T);
    for_inserted_rows<T>(x, rows, values, team, [&](T* to, const T* from) { std::memcpy(to, from, bytes); });
  });
}

TR_ENTRY(add_rows, Team& team, const Tensor& x, const Tensor& rows, const Tensor& values) {
  check_indices("add_rows_: rows", rows, x.size[0]);
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_inserted_rows<T>(x, rows, values, team, [&](T* to, const T* from) {
      for_two(x.size[1], [&](int64_t i, auto two) { two.store(to + i, two.load(to + i) + two.load(from + i)); });
    });
  });
}

}  // namespace tilerank::TR_RUNG
#endif
