// The threads that compute a kernel together: OpenMP's `parallel` and `for`, with waits of our own.
//
// A core that has nothing to do is halted, and waking a thread there takes a virtual machine 50 to
// 100 us, longer than most kernels of a small step.  A thread that spins instead is there at once, but
// takes the core from everyone else who wants it.  So threads spin as long as nobody does: as long as
// the system takes no core from one of them.
#pragma once

#include <cstdint>

namespace nightjar {

class Team;

// One thread's part in a region.  Loops of a region are one after another: none begins before every
// thread has ended the one before it.
class Member {
 public:
  Member(Team* team, int rank, int size) : team_(team), rank_(rank), size_(size) {}

  // Threads of the region.
  int size() const { return size_; }

  // body(i) for every i < count: an even share of them for each thread, one after another.
  template <typename Body>
  void share(int64_t count, Body body) {
    begin_loop();
    const int64_t end = count * (rank_ + 1) / size_;
    for (int64_t i = count * rank_ / size_; i < end; ++i) body(i);
  }

  // The same, but a member that has finished its share helps the others with theirs.
  template <typename Body>
  void take(int64_t count, Body body) {
    begin_loop();
    for (int other = 0; other < size_; ++other) {
      const int owner = (rank_ + other) % size_;
      const int64_t begin = count * owner / size_, end = count * (owner + 1) / size_;
      for (int64_t i = begin + taken(owner); i < end; i = begin + taken(owner)) body(i);
    }
  }

 private:
  void begin_loop();
  int64_t taken(int owner);

  Team* team_;  // null for a thread that is alone
  int rank_;
  int size_;
  int64_t loops_ = 0;
  int64_t own_taken_ = 0;
};

using RegionBody = void (*)(const void* context, Member& member);

// Runs the body on as many threads as torch is set to use, and returns when all have ended.  In it,
// numbers that are not normal are zeros (on x86).
void run_region(RegionBody body, const void* context);

template <typename Body>
void parallel(const Body& body) {
  run_region([](const void* context, Member& member) { (*static_cast<const Body*>(context))(member); },
             &body);
}

// Said by kernels that compute a layer's products: then nearly all that is computed is computed by this
// team, and its threads may spin between regions.  Elsewhere torch's threads need the cores then.
void expect_regions();

}  // namespace nightjar
