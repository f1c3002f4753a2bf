// Streams of the simulated device. A stream keeps its tasks in order and runs them as late as it may: when somebody waits.
//
//     host      give task a to stream 1 | give b to stream 2, which waits for an event after a | synchronize stream 2
//     stream 1  ....................................................................... a .....
//     stream 2  ........................................................................... b ..
//
// On a real GPU a task runs at some time between the moment it is given and the wait for it. A program that is right at the
// latest time and at the earliest time (a stream that is not late) has the waits that it needs.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace device {
// One lock for everything: tasks run one after the other, on the thread that waits for them. While it is held, no handle of
// a tensor that Python knows may be copied or dropped: that takes Python's lock, whose holder may wait for this one.
using Lock = std::lock_guard<std::recursive_mutex>;
inline std::recursive_mutex mutex;

constexpr long DEFAULT = 0;    // the stream on which a thread computes unless it chooses another
constexpr int LATE_DEFAULT = 1, LATE_OTHERS = 2;
inline int late = LATE_DEFAULT | LATE_OTHERS;

// What a program cost; python reads it as an array of long.
struct Counts {
    long kernels = 0;         // operations given to streams
    long copies_in = 0;       // host to device
    long copies_out = 0;      // device to host
    long copies_inside = 0;   // device to device
    long waits = 0;           // times that a host thread waited for a stream or an event
    long pinned_bytes = 0;    // host memory that is page-locked now
    long near_bytes = 0;      // device memory that tensors hold now
} inline counts;
inline std::map<long, long> waits_of_thread;    // by the system's number of the thread

struct Stream {
    std::deque<std::function<void()>> tasks;    // given and not begun
    long begun = 0, given = 0;                  // numbers of tasks; a position in the stream is such a number
};
inline std::map<long, Stream> streams;
inline long next_stream = DEFAULT + 1;
inline thread_local long current = DEFAULT;
inline std::exception_ptr failed;    // the first error of a task, raised at the next wait, as CUDA does

// Runs the tasks of a stream up to a position.
inline void run_until(long id, long position) {
    Lock lock(mutex);
    Stream &stream = streams[id];
    while (stream.begun < position && !stream.tasks.empty()) {
        auto task = std::move(stream.tasks.front());
        stream.tasks.pop_front();
        stream.begun++;
        try { task(); } catch (...) { if (!failed) failed = std::current_exception(); }
    }
}

inline bool passed(long id, long position) { return streams[id].begun >= position; }
inline long end_of(long id) { return streams[id].given; }

inline void give(long id, std::function<void()> task) {
    Lock lock(mutex);
    streams[id].tasks.push_back(std::move(task));
    streams[id].given++;
    if (!(late & (id == DEFAULT ? LATE_DEFAULT : LATE_OTHERS))) run_until(id, streams[id].given);
}

// The host waits: this is what a test counts.
inline void wait_until(long id, long position) {
    Lock lock(mutex);
    counts.waits++;
    waits_of_thread[syscall(SYS_gettid)]++;
    run_until(id, position);
    if (failed) std::rethrow_exception(std::exchange(failed, nullptr));
}
inline void wait_for(long id) { wait_until(id, end_of(id)); }

// An event is a task that notes the time.
struct Event {
    long stream, position;
    std::shared_ptr<double> at_ms;
};
inline Event event_on(long id) {
    Lock lock(mutex);
    auto at_ms = std::make_shared<double>(0);
    give(id, [at_ms] {
        *at_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    });
    return {id, end_of(id), at_ms};
}
}    // namespace device
