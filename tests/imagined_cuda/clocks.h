// Streams and events as vector clocks; accesses to memory; findings.
//
// Each stream counts its launches (ticks) and has a clock: for each stream, the last tick that is certain to have ended
// before the stream's next launch begins. An event is a copy of a clock, and to wait for it is to take the larger of
// two clocks. The host has a clock, too: what it has waited for; every launch takes it over. An access to memory is
// ordered after an earlier one if its stream's clock has reached the earlier one's tick. Else it is a race.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace imagined {

using Clock = std::vector<uint32_t>;  // by stream number
using Site = const std::string*;  // lines of Python, of Device::sites

inline uint32_t at(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

inline void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

struct Event {
  Clock clock;
  int stream = 0;
  uint64_t when = 0;  // the device's time, in launches
};

struct Access {
  uint64_t low, high;  // bytes of a storage
  int stream;
  uint32_t tick;
  bool write;
  std::string op;
  Site site;
  bool freed = false;  // of an earlier owner of this memory
};

constexpr size_t kMostAccesses = 256;  // of one block; the oldest go

struct HostAccess {  // of a copy that may still run: host memory that it reads or writes
  char *low, *high;
  int stream;
  uint32_t tick;
  bool write;
  Site site;
  std::vector<char> arriving;  // what the copy writes, kept back until the host has waited for it
};

struct Device {
  std::mutex mutex;
  std::vector<Clock> streams;
  Clock host;
  uint64_t time = 0;  // grows with every launch and every query
  uint64_t lag = 100;  // the device is so many launches behind the host
  std::map<std::tuple<std::string, std::string, Site, Site>, int> findings;  // (kind, text, two places): how often
  std::map<std::string, int64_t> launches;
  std::vector<HostAccess> host_accesses;
  std::set<std::string> sites;

  Clock& clock(int stream) {
    if (stream >= static_cast<int>(streams.size())) streams.resize(stream + 1);
    return streams[stream];
  }

  void find(const std::string& kind, const std::string& text, Site first, Site second) {
    ++findings[{kind, text, first, second}];
  }

  uint32_t launch(int stream, const std::string& op) {
    ++time;
    ++launches[op];
    auto& mine = clock(stream);
    merge(mine, host);
    if (mine.size() <= static_cast<size_t>(stream)) mine.resize(stream + 1);
    return ++mine[stream];
  }

  Event record(int stream) { return {clock(stream), stream, time}; }

  void wait(int stream, const Clock& other) { merge(clock(stream), other); }

  void host_waits(const Clock& other) {
    merge(host, other);
    for (auto one = host_accesses.begin(); one != host_accesses.end();) {
      if (at(host, one->stream) < one->tick) { ++one; continue; }
      if (!one->arriving.empty()) memcpy(one->low, one->arriving.data(), one->arriving.size());
      one = host_accesses.erase(one);
    }
  }

  // Whether the host sees that an event is over: it has waited for it, or the device has had the time to come there.
  bool query(const Event& event) {
    ++time;
    return seen(event);
  }

  bool seen(const Event& event) {
    bool over = at(host, event.stream) >= at(event.clock, event.stream) || time - event.when >= lag;
    if (over) host_waits(event.clock);
    return over;
  }

  void host_touches(char* low, char* high, bool write, const std::string& op, Site site) {
    for (auto& one : host_accesses)
      if (low < one.high && one.low < high && (write || one.write))
        find(one.write ? "host reads too early" : "host writes too early",
             op + " on the host, while a copy that nobody has waited for may still run", one.site, site);
  }

  // A copy from the host reads memory in which copies to the host still arrive: bytes are there for those that its
  // stream comes after. `shown` false: the copy has read them, and the host must not.
  void card_reads_host(char* low, char* high, int stream, bool shown, Site site) {
    for (auto& one : host_accesses) {
      if (one.arriving.empty() || high <= one.low || one.high <= low) continue;
      if (one.stream != stream && at(clock(stream), one.stream) < one.tick) {
        if (shown) find("race", "a copy to the host writes on stream " + std::to_string(one.stream) + ", a copy from it "
                        "reads on stream " + std::to_string(stream) + "; no event is between them", one.site, site);
      } else if (shown) {
        memcpy(one.low, one.arriving.data(), one.arriving.size());
      } else {
        memset(one.low, 0xff, one.arriving.size());
      }
    }
  }

  void forget_host(char* low, char* high) {
    std::erase_if(host_accesses, [&](auto& one) { return low < one.high && one.low < high; });
  }

  // A kernel's access to the memory of one storage. `accesses`: the earlier ones that still matter.
  void touch(std::vector<Access>& accesses, const Access& now) {
    auto& mine = clock(now.stream);
    for (auto& old : accesses) {
      if (old.high <= now.low || now.high <= old.low || (!old.write && !now.write)) continue;
      if (old.stream == now.stream || at(mine, old.stream) >= old.tick) continue;
      std::string kind = old.freed ? "reused too early" : "race";
      std::string text = old.op + (old.write ? " writes" : " reads") + " on stream " + std::to_string(old.stream) +
          (old.freed ? ", the memory is freed, and " : ", ") + now.op + (now.write ? " writes" : " reads") +
          " on stream " + std::to_string(now.stream) + "; no event is between them";
      find(kind, text, old.site, now.site);
      if (old.freed) old.high = old.low;  // said once
    }
    std::erase_if(accesses, [&](auto& old) {
      bool covered = now.low <= old.low && old.high <= now.high;
      return covered && (now.write || (!old.write && old.stream == now.stream));
    });
    accesses.push_back(now);
    if (accesses.size() > kMostAccesses) accesses.erase(accesses.begin());
  }
};

inline Device& device() {
  static Device* one = new Device;  // outlives the tensors of a process that ends
  return *one;
}

}  // namespace imagined
