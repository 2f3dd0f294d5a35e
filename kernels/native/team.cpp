// The team of this process: made when it is first needed, kept to the end.

#include "team.h"

#include <omp.h>
#include <pthread.h>
#include <sys/resource.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nightjar {
namespace {

constexpr int64_t kSpinNs = 100'000;    // what waking costs: spinning longer could not pay
constexpr int kProbes = 32;             // of a barrier for each reading of the clock
constexpr int64_t kTurnNs = 4'000'000;  // about what the system lets a program run for
constexpr int64_t kLongestPauseNs = 640'000'000;

int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// While it lives, its thread takes numbers that are too small to be normal for zeros: arithmetic with
// one costs as much time as a hundred others, and what they are worth is lost in any sum.
class Flushing {
 public:
#if defined(__x86_64__)
  Flushing() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#else
  Flushing() {}
#endif
};

// How often the system took the core from this thread while it had something to do; without such a
// count it is as if it did all the time.
int64_t interruptions() {
#if defined(RUSAGE_THREAD)
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
#else
  static thread_local int64_t calls = 0;
  return ++calls;
#endif
}

// When threads may spin.  One that finds that it was interrupted ends it for all of them, for the
// length of a turn; for twice the last pause if that ended less than a turn ago.
class Spinning {
 public:
  bool allowed(int64_t now) {
    static thread_local int64_t known = 0;
    const int64_t count = interruptions();
    const int64_t paused_until = paused_until_.load(std::memory_order_relaxed);
    const bool interrupted = count != known;
    known = count;
    if (now < paused_until) return false;
    if (!interrupted) return true;
    const bool at_once = now - paused_until < kTurnNs;
    const int64_t longer = std::min(2 * pause_.load(std::memory_order_relaxed), kLongestPauseNs);
    const int64_t pause = at_once ? longer : kTurnNs;
    pause_.store(pause, std::memory_order_relaxed);
    paused_until_.store(now + pause, std::memory_order_relaxed);
    return false;
  }

 private:
  std::atomic<int64_t> paused_until_{0};
  std::atomic<int64_t> pause_{kTurnNs};
};

Spinning spinning;

// Whether a region is nearly always followed by the next one.
std::atomic<bool> regions_expected{false};

// A number that threads wait to see change.
class Barrier {
 public:
  uint32_t number() const { return number_.load(std::memory_order_acquire); }

  void open() {
    number_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
  }

  // Returns when the number is no longer `seen`.
  void pass(uint32_t seen, bool may_spin) {
    if (number() != seen) return;
    const int64_t start = nanoseconds();
    if (may_spin && spinning.allowed(start)) {
      do {
        for (int probe = 0; probe < kProbes && number() == seen; ++probe) relax();
      } while (number() == seen && nanoseconds() - start < kSpinNs);
    }
    sleepers_.fetch_add(1);
    while (number() == seen) sleep(seen);
    sleepers_.fetch_sub(1);
  }

 private:
  // C++'s own waiting gives up its turn a few times before it sleeps (GCC 12): where other programs
  // want the core, that is milliseconds each time.
#if defined(__linux__)
  void sleep(uint32_t seen) {
    syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t seen) { number_.wait(seen); }
  void wake() { number_.notify_all(); }
#endif

  alignas(64) std::atomic<uint32_t> number_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace

// How many of a thread's share of a loop are taken.
struct alignas(64) Taken {
  std::atomic<int64_t> count{0};
};

// Rank 0 is the calling thread; the others wait for a region, compute it, and wait for the next.
class Team {
 public:
  void run(RegionBody body, const void* context) {
    const Flushing small_numbers;
    const std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    const int threads = omp_get_max_threads();
    if (threads < 2 || !mine.owns_lock()) {
      // There is no other thread, or another caller has them: the cores are busy anyway.
      Member alone(nullptr, 0, 1);
      body(context, alone);
      return;
    }
    if (threads != size_) resize(threads);
    const uint32_t unfinished = finished_.number();
    begin(body, context);
    Member first(this, 0, size_);
    body(context, first);
    if (left_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
      finished_.pass(unfinished, true);
    }
  }

  void barrier() {
    const uint32_t seen = together_.number();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      nothing_taken();
      together_.open();
    } else {
      together_.pass(seen, true);
    }
  }

  int64_t taken(int owner) { return taken_[owner].count.fetch_add(1, std::memory_order_relaxed); }

 private:
  void begin(RegionBody body, const void* context) {
    body_ = body;
    context_ = context;
    left_.store(0, std::memory_order_relaxed);
    nothing_taken();
    region_.open();
  }

  void nothing_taken() {
    for (Taken& taken : taken_) taken.count.store(0, std::memory_order_relaxed);
  }

  void resize(int threads) {
    begin(nullptr, nullptr);
    for (std::thread& thread : others_) thread.join();
    others_.clear();
    size_ = threads;
    taken_ = std::vector<Taken>(threads);
    for (int rank = 1; rank < threads; ++rank) {
      others_.emplace_back(&Team::serve, this, rank, region_.number());
    }
  }

  // The life of a thread; seen: the last region that is none of its own.
  void serve(int rank, uint32_t seen) {
    const Flushing small_numbers;
    for (;; ++seen) {
      region_.pass(seen, regions_expected.load(std::memory_order_relaxed));
      if (body_ == nullptr) return;
      Member member(this, rank, size_);
      body_(context_, member);
      if (left_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) finished_.open();
    }
  }

  std::mutex busy_;
  int size_ = 1;
  std::vector<std::thread> others_;
  RegionBody body_ = nullptr;
  const void* context_ = nullptr;
  Barrier region_;
  Barrier together_;
  Barrier finished_;
  std::vector<Taken> taken_;
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<int> left_{0};
};

namespace {

// Never taken down: its threads wait until the process has ended.  A fork's child has none of them and
// begins with a team of its own.
Team* team = nullptr;

Team& the_team() {
  static std::once_flag once;
  std::call_once(once, [] {
    team = new Team;
    pthread_atfork(nullptr, nullptr, [] { team = new Team; });
  });
  return *team;
}

}  // namespace

void Member::begin_loop() {
  if (loops_++ > 0 && size_ > 1) team_->barrier();
  own_taken_ = 0;
}

int64_t Member::taken(int owner) { return size_ > 1 ? team_->taken(owner) : own_taken_++; }

void run_region(RegionBody body, const void* context) { the_team().run(body, context); }

void expect_regions() { regions_expected.store(true, std::memory_order_relaxed); }

}  // namespace nightjar
