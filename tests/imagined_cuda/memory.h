// Device memory by the rules of PyTorch's caching allocator: sizes rounded to 512 bytes, small blocks from segments of
// 2 MB, larger ones from 20 MB, best fit, splits, a pool per stream, neighbours merged when freed.
//
// Addresses are simulated; the values lie in host memory of their own. A freed block keeps its accesses: if its memory
// is given away again before those of other streams are over, the new owner's first access finds them. record_stream
// keeps a block back until the recorded stream is over, as in PyTorch.
#pragma once
#include "clocks.h"
#include <cstdlib>
#include <new>

namespace imagined {

struct Block;
using Pool = std::map<std::pair<uint64_t, uint64_t>, Block*>;  // by size and address

struct Block {
  uint64_t low, size;
  int stream;
  bool small;
  Pool* pool;
  bool free = false;
  Block *before = nullptr, *after = nullptr;  // neighbours in a segment
  std::vector<Access> accesses;
  std::vector<int> recorded;  // streams other than its own that use it
  void* host = nullptr;
  size_t requested = 0;
};

struct Memory {
  std::map<std::pair<int, bool>, Pool> pools;  // by stream and smallness
  std::vector<std::pair<Block*, std::vector<Event>>> kept_back;
  int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, capacity = int64_t(80) << 30;
  int64_t allocations = 0, fail_at = -1;
  uint64_t end = 1 << 20;

  static constexpr uint64_t kSmall = 1 << 20, kSmallSegment = 2 << 20, kLarge = 10 << 20, kLargeSegment = 20 << 20;

  // nullptr: out of memory.
  Block* allocate(size_t bytes, int stream) {
    release();
    if (allocations++ == fail_at) return nullptr;
    uint64_t size = (bytes + 511) / 512 * 512;
    bool small = size <= kSmall;
    auto& pool = pools[{stream, small}];
    auto found = pool.lower_bound({size, 0});
    Block* block = found == pool.end() ? segment(size, stream, small, pool) : found->second;
    if (!block) return nullptr;
    pool.erase({block->size, block->low});
    block->free = false;
    split(block, size, small ? 512 : kSmall + 1);
    block->requested = bytes;
    block->host = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!block->host) throw std::bad_alloc();
    allocated += block->size;
    peak = std::max(peak, allocated);
    return block;
  }

  void free(Block* block) {
    std::free(block->host);
    block->host = nullptr;
    allocated -= block->size;
    keep_last_of_own(block->accesses, block->stream);
    for (auto& one : block->accesses) one.freed = true;
    if (block->recorded.empty()) return give_back(block);
    std::vector<Event> events;
    for (int stream : block->recorded) events.push_back(device().record(stream));
    kept_back.emplace_back(block, std::move(events));
  }

 private:
  // Of the accesses on the block's own stream, which are in order, the last stands for all.
  static void keep_last_of_own(std::vector<Access>& accesses, int stream) {
    const Access* last = nullptr;
    uint64_t low = ~uint64_t(0), high = 0;
    for (auto& one : accesses)
      if (one.stream == stream) {
        if (!last || one.tick >= last->tick) last = &one;
        low = std::min(low, one.low), high = std::max(high, one.high);
      }
    if (!last) return;
    Access kept = *last;
    kept.low = low, kept.high = high, kept.write = kept.freed = true;
    std::erase_if(accesses, [&](auto& one) { return one.stream == stream; });
    accesses.push_back(kept);
  }

  Block* segment(uint64_t size, int stream, bool small, Pool& pool) {
    uint64_t rounded = (size + kSmallSegment - 1) / kSmallSegment * kSmallSegment;
    uint64_t whole = small ? kSmallSegment : size < kLarge ? kLargeSegment : rounded;
    if (reserved + int64_t(whole) > capacity) {  // as PyTorch, which then waits for what it has kept back
      for (auto& [block, events] : kept_back)
        for (auto& event : events) device().host_waits(event.clock);
      release();
      give_segments_back();
    }
    if (reserved + int64_t(whole) > capacity) return nullptr;
    auto* block = new Block{end, whole, stream, small, &pool};
    end += whole;
    reserved += whole;
    peak_reserved = std::max(peak_reserved, reserved);
    return block;
  }

  void split(Block* block, uint64_t size, uint64_t least) {
    if (block->size - size < least) return;
    auto* rest = new Block{block->low + size, block->size - size, block->stream, block->small, block->pool, true};
    rest->before = block, rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    for (auto& one : block->accesses)
      if (one.high > rest->low) {
        rest->accesses.push_back(one);
        rest->accesses.back().low = std::max(one.low, rest->low);
        one.high = std::min(one.high, rest->low);
      }
    std::erase_if(block->accesses, [](auto& one) { return one.low >= one.high; });
    block->pool->insert({{rest->size, rest->low}, rest});
  }

  // Blocks whose recorded streams the host has seen to be over.
  void release() {
    for (auto one = kept_back.begin(); one != kept_back.end();) {
      auto over = [](auto& event) { return device().seen(event); };
      if (!std::all_of(one->second.begin(), one->second.end(), over)) { ++one; continue; }
      one->first->recorded.clear();
      give_back(one->first);
      one = kept_back.erase(one);
    }
  }

  void give_back(Block* block) {
    for (Block* other : {block->before, block->after})
      if (other && other->free) {
        block->pool->erase({other->size, other->low});
        block->low = std::min(block->low, other->low);
        block->size += other->size;
        block->accesses.insert(block->accesses.end(), other->accesses.begin(), other->accesses.end());
        (other == block->before ? block->before : block->after) = other == block->before ? other->before : other->after;
        delete other;
      }
    auto& known = block->accesses;
    keep_last_of_own(known, block->stream);
    if (known.size() > kMostAccesses) known.erase(known.begin(), known.end() - kMostAccesses);
    if (block->before) block->before->after = block;
    if (block->after) block->after->before = block;
    block->free = true;
    block->pool->insert({{block->size, block->low}, block});
  }

  void give_segments_back() {
    for (auto& [key, pool] : pools)
      std::erase_if(pool, [&](auto& one) {
        Block* block = one.second;
        if (block->before || block->after) return false;
        reserved -= block->size;
        delete block;
        return true;
      });
  }
};

inline Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}

}  // namespace imagined
