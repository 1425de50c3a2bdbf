// The memory of tensors: blocks for activations, and whole mappings for weights and caches.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace tilerank {

// Anonymous, zeroed, private memory, with huge pages (madvise) where they waste little. Throws Error.
void* map_pages(size_t bytes);
void unmap_pages(void* data, size_t bytes);

// Maps the first `bytes` of a memory file (memfd_create), shared with other mappings of it. `bytes`: whole huge pages,
// which unmap_pages gets as well. Throws Error.
void* map_file(int file, size_t bytes, bool writable);

// Joins the pages of such a mapping to huge ones, each on the node of its first small page. Returns 0, or an errno if
// some pages stay small.
int join_pages(void* data, size_t bytes);

// Makes such a mapping read-only. Throws Error.
void protect_pages(void* data, size_t bytes);

// Drops the whole pages inside [data, data + bytes), all of which must be in file mappings, from resident memory.
// Throws Error.
void drop_file_pages(void* data, size_t bytes);

// Hands out blocks, in multiples of 64 bytes, of huge-page mappings that grow as needed. Takes the best fit and merges
// free neighbours. Thread-safe: the last view of a tensor may die on any thread. Every tensor shares the ownership of
// its arena.
class Arena {
 public:
  static const std::shared_ptr<Arena>& instance();  // the process's arena, for eager runs; never destroyed
  // `replayed`: a freed block may still be written, by later runs of a graph.
  explicit Arena(bool replayed = false) : replayed_(replayed) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  void* allocate(size_t bytes);
  // Releases one holder of a block from `allocate` or `hold`. The block is free once all holders have released it.
  void free(void* data);
  // Adds a holder to the block that contains data and returns the block; null if no block contains it.
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
  std::map<char*, size_t> chunks_;  // by address; blocks are not merged across the starts of chunks
  size_t mapped_ = 0, used_ = 0;
};

}  // namespace tilerank
