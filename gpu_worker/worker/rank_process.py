"""One rank's process, as the launcher sees it: its signs of life and its end."""

from dataclasses import dataclass
from pathlib import Path

from nightjar.children import Process, how_ended
from nightjar.gpu_worker.shards.activity import FIRST_SIGN, Doing, Sign
from nightjar.gpu_worker.shards.exits import EXIT_FAILED


@dataclass(slots=True)
class RankProcess:
    """One rank's process, and what is known of it.

    life: File descriptor of its signs of life; None after its end, and for the only process.
    silent_s: Seconds since its last sign of life.
    late_s: Seconds that it has stood still while another rank waited for it.
    worked: Its user and system time when last read.
    """

    rank: int
    process: Process
    life: int | None
    sign: Sign = FIRST_SIGN
    silent_s: float = 0.0
    late_s: float = 0.0
    worked: tuple[int, ...] = ()

    def note_sign(self, sign: Sign) -> None:
        """Note a sign of life."""
        self.silent_s = 0.0
        if sign != self.sign:
            self.sign, self.late_s = sign, 0.0

    def note_silence(self, passed_s: float) -> None:
        """Note that no sign of life came for so long.

        A process that reads weights from a slow disk may hold Python's lock for longer than a step
        may take. For such a process, the system is asked whether it works.
        """
        loads = self.sign.doing is Doing.LOADING and self._is_at_work()
        self.silent_s = 0.0 if loads else self.silent_s + passed_s

    def is_waited_for_by(self, other: "RankProcess") -> bool:
        """Return whether another rank can do nothing until this one continues."""
        if self.sign.doing is not Doing.WORKING:
            return False
        if self.rank == 0 and other.sign.doing is Doing.AWAITING_COMMAND:
            return True
        return other.sign.position > self.sign.position

    def _is_at_work(self) -> bool:
        """Return whether the process has computed since the last call, or waits for a disk."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return True  # not on this system
        state, *numbers = stat.rpartition(")")[2].split()
        before, self.worked = self.worked, tuple(map(int, numbers[10:12]))  # user, system time
        return state == "D" or self.worked != before


def how_rank_ended(status: int) -> str:
    """Say, as a verb, how a rank with this exit status ended."""
    if status == EXIT_FAILED:
        return "ended by an error of its own: see the log"
    return how_ended(status)
