// Streams and events as vector clocks; accesses to memory; findings.
//
// Each stream counts its launches (ticks) and has a clock: for each stream, the last tick that is certain to have ended
// before the stream's next launch begins. An event is a copy of a clock, and to wait for it is to take the larger of
// two clocks. The host is stream 0: its clock is what it has waited for, and every launch takes it over. An access to
// memory is ordered after an earlier one if its stream's clock has reached the earlier one's tick. Else it is a race.
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

constexpr int kHost = 0;
constexpr size_t kMostAccesses = 256;  // of one block; the oldest go

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
  int64_t low, high;  // bytes of a block
  int stream;
  uint32_t tick;
  bool write;
  std::string op;
  Site site;
  bool freed = false;  // of an earlier owner of this memory

  std::string text() const {
    auto where = stream == kHost ? " on the host" : " on stream " + std::to_string(stream - 1);
    return op + (write ? " writes" : " reads") + where;
  }
};

struct Arrival {  // what a copy writes into the host's memory, kept back until the host has waited for it
  char* low;
  std::vector<char> bytes;
  int stream;
  uint32_t tick;
};

struct Device {
  std::mutex mutex;
  std::vector<Clock> streams{1};
  uint64_t time = 0;  // grows with every launch and every query
  uint64_t lag = 100;  // the device is so many launches behind the host
  std::map<std::tuple<std::string, std::string, Site, Site>, int> findings;  // (kind, text, two places): how often
  std::map<std::string, int64_t> launches;
  std::vector<Arrival> arriving;
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
    merge(mine, streams[kHost]);
    if (mine.size() <= static_cast<size_t>(stream)) mine.resize(stream + 1);
    return ++mine[stream];
  }

  Event record(int stream) { return {clock(stream), stream, time}; }

  // A stream, or the host, goes on only after this.
  void wait(int stream, const Clock& until) {
    merge(clock(stream), until);
    if (stream != kHost) return;
    std::erase_if(arriving, [&](auto& one) {
      bool over = is_ordered(one.stream, one.tick, kHost);
      if (over) memcpy(one.low, one.bytes.data(), one.bytes.size());
      return over;
    });
  }

  bool is_ordered(int earlier, uint32_t tick, int later) {
    return earlier == later || at(clock(later), earlier) >= tick;
  }

  // Whether the host sees that an event is over: it has waited for it, or the device has had the time to come there.
  bool query(const Event& event) {
    ++time;
    return seen(event);
  }

  bool seen(const Event& event) {
    bool over = is_ordered(event.stream, at(event.clock, event.stream), kHost) || time - event.when >= lag;
    if (over) wait(kHost, event.clock);
    return over;
  }

  // A copy from the host's memory sees what arrives there before it, by streams; the host must not.
  void show(char* low, char* high, int stream, bool shown) {
    for (auto& one : arriving) {
      if (high <= one.low || one.low + one.bytes.size() <= low || !is_ordered(one.stream, one.tick, stream)) continue;
      if (shown) memcpy(one.low, one.bytes.data(), one.bytes.size());
      else memset(one.low, 0xff, one.bytes.size());
    }
  }

  // An access to a block. `accesses`: the earlier ones that still matter. The host's own are over at once.
  void touch(std::vector<Access>& accesses, const Access& now) {
    for (auto& old : accesses) {
      if (old.high <= now.low || now.high <= old.low || (!old.write && !now.write)) continue;
      if (is_ordered(old.stream, old.tick, now.stream)) continue;
      bool by_host = now.stream == kHost;
      auto kind = old.freed ? "reused too early" : !by_host ? "race" : old.write ? "host reads too early"
                                                                                 : "host writes too early";
      find(kind, old.text() + (old.freed ? ", the memory is freed, and " : ", ") + now.text() +
                 (by_host ? "; it has not waited for it" : "; no event is between them"), old.site, now.site);
      if (old.freed) old.high = old.low;  // said once
    }
    if (now.stream == kHost) return;
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
