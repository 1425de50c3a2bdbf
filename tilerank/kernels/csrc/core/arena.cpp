#include "core/arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>

#include "core/kernel.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tilerank {
namespace {

// The address sanitizer reports accesses outside of live blocks, and to the gap between blocks.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGap = 64;
void allow(void* data, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
void forbid(void* data, size_t bytes) { ASAN_POISON_MEMORY_REGION(data, bytes); }
#else
constexpr size_t kGap = 0;
void allow(void*, size_t) {}
void forbid(void*, size_t) {}
#endif

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kFirstChunk = size_t{8} << 20;
constexpr size_t kAlign = 64;
constexpr int kMadvCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older C libraries do not name
constexpr int kAttempts = 8;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
size_t page_size() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// If most of the last huge page lay beyond the end, it would waste resident memory, so the end gets small pages. Access
// to them is slower, because they miss the TLB.
size_t mapping_size(size_t bytes) {
  const size_t huge = round_up(bytes, kHuge);
  return huge - bytes <= bytes / 3 ? huge : round_up(std::max<size_t>(bytes, 1), page_size());
}

// Maps memory or a file at the start of a huge page, if it is as large as one.
void* map_aligned(size_t size, int protection, int flags, int file) {
  // Maps more than needed, then trims.
  const size_t reserve = size >= kHuge ? size + kHuge : size;
  void* const mapping = mmap(nullptr, reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return mapping;
  char* const raw = static_cast<char*>(mapping);
  char* start = raw;
  if (size >= kHuge) start = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(raw), kHuge));
  if (start != raw) munmap(raw, static_cast<size_t>(start - raw));
  if (raw + reserve != start + size) munmap(start + size, static_cast<size_t>(raw + reserve - (start + size)));
  void* const placed = mmap(start, size, protection, flags | MAP_FIXED, file, 0);
  if (placed == MAP_FAILED) {
    const int reason = errno;
    munmap(start, size);
    errno = reason;
  }
  return placed;
}

[[noreturn]] void fail(const char* where, size_t bytes) {
  const std::string reason = std::strerror(errno);
  throw Error(std::string(where) + ": expected " + std::to_string(bytes) + " bytes of memory, found " + reason);
}

}  // namespace

void* map_pages(size_t bytes) {
  const size_t size = mapping_size(bytes);
  void* const start = map_aligned(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (start == MAP_FAILED) fail("alloc", bytes);
  // Only advice: without huge pages the memory is the same, but slower.
  if (size >= kHuge) madvise(start, size / kHuge * kHuge, MADV_HUGEPAGE);
  return start;
}

void* map_file(int file, size_t bytes, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  const int flags = writable ? MAP_SHARED : MAP_SHARED | MAP_POPULATE;  // what is only read is there already
  void* const start = map_aligned(bytes, protection, flags, file);
  if (start == MAP_FAILED) fail("map_file", bytes);
  return start;
}

int join_pages(void* data, size_t bytes) {
  // Pages that another processor still counts in a cache of its own are busy for a moment.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (madvise(data, bytes, kMadvCollapse) == 0) return 0;
    if (errno != EAGAIN && errno != EBUSY) break;
  }
  return errno;
}

void protect_pages(void* data, size_t bytes) {
  if (mprotect(data, bytes, PROT_READ)) fail("protect", bytes);
}

void unmap_pages(void* data, size_t bytes) { munmap(data, mapping_size(bytes)); }

void drop_file_pages(void* data, size_t bytes) {
  const uintptr_t page = page_size();
  const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(data), page);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (first >= last) return;
  // Dropping anonymous memory would lose its content, so check first that every byte is in a file mapping.
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(fopen("/proc/self/maps", "r"), fclose);
  if (!maps) throw Error(std::string("drop_pages: expected to read /proc/self/maps, found ") + std::strerror(errno));
  uintptr_t covered = first;
  char line[8192];
  while (covered < last && fgets(line, sizeof(line), maps.get())) {
    uintptr_t start = 0, end = 0;
    unsigned long inode = 0;
    if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %lu", &start, &end, &inode) != 3) continue;
    if (start <= covered && covered < end && inode != 0) covered = end;
  }
  if (covered < last) throw Error("drop_pages: expected a tensor inside a file mapping, found other memory");
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

const std::shared_ptr<Arena>& Arena::instance() {
  static const auto* arena = [] {  // never destroyed: tensors may die after static destructors
    pthread_atfork([] { instance()->lock_.lock(); }, [] { instance()->lock_.unlock(); },
                   [] { instance()->lock_.unlock(); });
    return new std::shared_ptr<Arena>(std::make_shared<Arena>());
  }();
  return *arena;
}

Arena::~Arena() {
  for (const auto& [start, size] : chunks_) {
    allow(start, size);
    unmap_pages(start, size);
  }
}

bool Arena::contains(const void* data) {
  std::lock_guard lock(lock_);
  const auto after = chunks_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (after == chunks_.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return data < start + size;
}

void* Arena::hold(const void* data) {
  std::lock_guard lock(lock_);
  auto block = used_blocks_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (block == used_blocks_.begin()) return nullptr;
  --block;
  if (data >= block->first + block->second.bytes) return nullptr;
  ++block->second.holders;
  return block->first;
}

void* Arena::allocate(size_t bytes) {
  const size_t size = round_up(std::max<size_t>(bytes, 1), kAlign) + kGap;
  std::lock_guard lock(lock_);
  auto fit = free_by_size_.lower_bound({size, nullptr});
  if (fit == free_by_size_.end()) {
    add_chunk(size);
    fit = free_by_size_.lower_bound({size, nullptr});
  }
  const auto [block_size, start] = *fit;
  erase_free(free_.find(start));
  if (block_size > size) insert_free(start + size, block_size - size);
  used_blocks_[start] = {size, 1};
  used_ += size - kGap;
  allow(start, bytes);
  return start;
}

void Arena::free(void* data) {
  std::lock_guard lock(lock_);
  const auto block = used_blocks_.find(static_cast<char*>(data));
  if (--block->second.holders > 0) return;
  char* start = block->first;
  size_t size = block->second.bytes;
  used_ -= size - kGap;
  used_blocks_.erase(block);
  if (!replayed_) forbid(start, size);
  const auto after = free_.find(start + size);
  if (after != free_.end() && !chunks_.count(after->first)) {
    size += after->second;
    erase_free(after);
  }
  auto before = free_.lower_bound(start);
  if (before != free_.begin() && !chunks_.count(start)) {
    --before;
    if (before->first + before->second == start) {
      start = before->first;
      size += before->second;
      erase_free(before);
    }
  }
  insert_free(start, size);
}

void Arena::add_chunk(size_t bytes) {
  // Chunks double in size, so that there are few mappings however large the activations become.
  const size_t size = round_up(std::max({bytes, mapped_, kFirstChunk}), kHuge);
  char* const start = static_cast<char*>(map_pages(size));
  chunks_[start] = size;
  mapped_ += size;
  forbid(start, size);
  insert_free(start, size);
}

void Arena::insert_free(char* start, size_t bytes) {
  free_[start] = bytes;
  free_by_size_.insert({bytes, start});
}

void Arena::erase_free(std::map<char*, size_t>::iterator block) {
  free_by_size_.erase({block->second, block->first});
  free_.erase(block);
}

}  // namespace tilerank
