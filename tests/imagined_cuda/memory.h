// Device memory, counted in 512 bytes as by PyTorch's caching allocator, whose frees wait for nothing: a block may go to
// the next owner on its stream at once. So each block begins with the last access of each stream to what was freed on
// its own stream, and an access of the new owner that no event orders behind them is found. record_stream keeps a block
// back until the recorded stream is over.
#pragma once
#include "clocks.h"
#include <cstdlib>
#include <new>

namespace imagined {

struct Block {
  int64_t size;
  int stream;
  char* host;  // where the values lie
  std::vector<Access> accesses;
  std::vector<int> recorded;  // streams other than its own that use it
};

struct Memory {
  std::map<int, std::map<int, Access>> freed;  // by the memory's stream and the access's
  std::vector<std::pair<Block*, std::vector<Event>>> kept_back;
  int64_t allocated = 0, peak = 0, reserved = 0, capacity = int64_t(80) << 30;  // reserved: with what is kept back
  int64_t allocations = 0, fail_at = -1;

  // nullptr: out of memory.
  Block* allocate(size_t bytes, int stream) {
    release();
    int64_t size = (bytes + 511) / 512 * 512;
    if (allocations++ == fail_at) return nullptr;
    if (reserved + size > capacity) {  // as PyTorch, which then waits for what it has kept back
      for (auto& [block, events] : kept_back)
        for (auto& event : events) device().wait(kHost, event.clock);
      release();
    }
    if (reserved + size > capacity) return nullptr;
    auto* block = new Block{size, stream, static_cast<char*>(aligned_alloc(64, size))};
    if (!block->host) throw std::bad_alloc();
    for (auto& [by, access] : freed[stream]) block->accesses.push_back(access);
    for (auto& access : block->accesses) access.high = bytes;
    reserved += size;
    allocated += size;
    peak = std::max(peak, allocated);
    return block;
  }

  void free(Block* block) {
    std::free(block->host);
    allocated -= block->size;
    std::vector<Event> events;
    for (int stream : block->recorded) events.push_back(device().record(stream));
    kept_back.emplace_back(block, std::move(events));
    release();
  }

 private:
  // Blocks whose recorded streams the host has seen to be over.
  void release() {
    auto over = [](auto& event) { return device().seen(event); };
    std::erase_if(kept_back, [&](auto& one) {
      auto& [block, events] = one;
      if (!std::all_of(events.begin(), events.end(), over)) return false;
      for (auto& access : block->accesses) {
        auto [last, first_one] = freed[block->stream].try_emplace(access.stream, access);
        if (!first_one && last->second.tick > access.tick) continue;
        last->second = access;
        last->second.low = 0, last->second.write = last->second.freed = true;
      }
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
