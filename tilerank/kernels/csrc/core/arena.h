// Where tensors live: blocks for activations, and whole mappings for weights and caches.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace tilerank {

// Anonymous, zeroed, private memory; huge pages (madvise) where they waste little. Throws Error.
void* map_pages(size_t bytes);
void unmap_pages(void* data, size_t bytes);

// Takes the whole pages inside [data, data + bytes), all of them in file mappings, out of resident memory. Throws
// Error.
void drop_file_pages(void* data, size_t bytes);

// Blocks of 64-byte multiples out of huge-page mappings that grow as needed: best fit, neighbours merged when freed.
// Thread-safe: the last view of a tensor may die on any thread. Every tensor shares the ownership of its arena.
class Arena {
 public:
  static const std::shared_ptr<Arena>& instance();  // the process's, for whatever runs eagerly; never ends
  // `replayed`: a block that was given back is still written, by the runs of a graph.
  explicit Arena(bool replayed = false) : replayed_(replayed) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  void* allocate(size_t bytes);
  // What `allocate` returned, or `hold`: a block is free when everybody who has it gave it back.
  void free(void* data);
  // The block that data lies in, now with one more holder; null if it lies in none.
  void* hold(const void* data);
  bool contains(const void* data);
  size_t mapped() const { return mapped_; }
  size_t used() const { return used_; }

 private:
  void add_chunk(size_t bytes);
  void insert_free(char* start, size_t bytes);
  void erase_free(std::map<char*, size_t>::iterator block);

  const bool replayed_;
  std::mutex lock_;
  std::map<char*, size_t> free_;  // by address
  std::set<std::pair<size_t, char*>> free_by_size_;
  struct Used {
    size_t bytes;
    int holders;
  };
  std::map<char*, Used> used_blocks_;
  std::map<char*, size_t> chunks_;  // by address; blocks never merge across their starts
  size_t mapped_ = 0, used_ = 0;
};

}  // namespace tilerank
