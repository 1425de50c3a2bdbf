// The linear kernels of rows that are quantised to int8, compiled once per rung (no include guard; include after
// epilogue-inl.h and int8_stripes-inl.h, and with AMX after int8_tiles_amx-inl.h).

namespace tilerank::TR_RUNG {

// All quantised rows. They form stripes of about equal size, each of which stays in the L2 cache while it is multiplied
// with many blocks.
template <class Form>
struct Int8Stripes {
  using Stripe = Int8Stripe<Form>;
  int64_t m, k, count;
  char* codes;

  Int8Stripes(int64_t m, int64_t k, char* codes) : m(m), k(k), codes(codes) {
    constexpr int64_t kBytes = 640 << 10, kLeastRows = 48;
    count = blocks(m, std::clamp(kBytes / Stripe::row_bytes(k), kLeastRows, Stripe::kMostRows));
  }
  Range rows(int64_t stripe) const { return {m * stripe / count, m * (stripe + 1) / count}; }
  Stripe operator[](int64_t stripe) const {
    const Range own = rows(stripe);
    return {codes + own.begin * Stripe::row_bytes(k), own.end - own.begin, k};
  }
  static size_t bytes(int64_t m, int64_t k) { return static_cast<size_t>(m * Stripe::row_bytes(k)); }

  // Quantises this thread's share of the rows.
  void quantise(const Tensor& x, const Team& team) const {
    const Range own = team.share(m);
    for (int64_t stripe = 0; stripe < count; ++stripe) {
      const Range all = rows(stripe);
      const Range some{std::max(own.begin, all.begin) - all.begin, std::min(own.end, all.end) - all.begin};
      (*this)[stripe].put(some, [&](int64_t row) { return x.row<const bf16>(all.begin + row); });
    }
  }
};

// scratch: Int8Stripes::bytes, or none if every thread quantises all rows for itself
template <class Form>
static void linear_int8_vectors(const LinearArgs& args, const typename Form::Weight& w, Team& team) {
  using Stripes = Int8Stripes<Form>;
  const Tensor& x = args.x;
  const Epilogue epilogue(args);
  const int64_t m = x.size[0], k = x.size[1];
  const bool alone = !args.scratch;
  constexpr size_t kWorking = Int8Stripe<Form>::kWorking;
  char* const memory = static_cast<char*>(team.scratch(kWorking + (alone ? Stripes::bytes(m, k) : 0)));
  const Stripes stripes(m, k, alone ? memory + kWorking : args.scratch.as<char>());
  stripes.quantise(x, alone ? Team(nullptr, 0, 1) : team);
  if (!alone) team.barrier();

  const Range share = team.share(stripes.count * epilogue.results);
  for (int64_t task = share.begin; task < share.end; ++task) {
    const int64_t stripe = task / epilogue.results, result = task % epilogue.results,
                  first = stripes.rows(stripe).begin;
    const auto emit = [&](int64_t row, const Vec32& values, const Vec32& up) {
      epilogue.write(first + row, result, values, up);
    };
    stripes[stripe].multiply(w, result * epilogue.parts, epilogue.parts, memory, emit);
  }
}

#ifdef TR_AMX
// The linear kernel. At most 16 rows are bound by memory and multiplied in vectors. scratch: Int8Tiles::bytes
template <class Form, int kParts>
static void linear_int8_tiles(const LinearArgs& args, const typename Form::Weight& w, const Epilogue& epilogue,
                              Team& team) {
  using Rows = Int8Tiles<Form>;
  const Tensor& x = args.x;
  const int64_t m = x.size[0];
  const Rows rows(args.scratch.as<char>(), m, x.size[1]);
  const Range share = team.share(m);
  for (int64_t row = share.begin; row < share.end; ++row) rows.put(x.row<const bf16>(row), x.size[1], row);
  team.barrier();

  const Tiles tiles(Rows::shapes());
  char* const working = static_cast<char*>(team.scratch(Rows::kWorking));
  const Grid grid(team, rows.packed.row_tiles, epilogue.results, Rows::kStripe);
  epilogue.with_destination<kParts>([&]<class To>(const To& to) {
    const ProductFinish<kParts, To, TotalScaling<Form> > finish{to, {w}};
    grid.for_stripes(Rows::kStripe, [&](Range stripe) {
      rows.template multiply<kParts>(stripe, m, w, grid.results, working, finish);
    });
  });
}

template <class Form>
static void linear_int8_tiles(const LinearArgs& args, const typename Form::Weight& w, Team& team) {
  if (args.x.size[0] <= kTileRows) return linear_int8_vectors<Form>(args, w, team);
  const Epilogue epilogue(args);
  epilogue.parts == 2 ? linear_int8_tiles<Form, 2>(args, w, epilogue, team)
                      : linear_int8_tiles<Form, 1>(args, w, epilogue, team);
}
#endif

}  // namespace tilerank::TR_RUNG
