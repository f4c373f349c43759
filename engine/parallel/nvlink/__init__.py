"""What ranks of one NVLink host send one another, by stores into peers' memory.

Expert dispatch and combine, for decode: few tokens, fixed shapes, nothing that the host reads. And
the sums and gathers of tensor-parallel prefill (`reduce_scatter`, `all_gather`), by the same
counters; what experts return goes home by the same kernels in both (`sums`). Not for ranks of
several hosts. The key idea of a dispatch: a token travels once to each
*rank* that holds some of its experts, not once to each expert, and comes home as one row, which is
the sum of that rank's experts. With groups of experts that stand on few ranks this halves what the
wire carries.

A transfer is a dispatch, a combine, a sum or a gather, and has two halves, a kernel each:

- *send* writes straight into every peer's buffer, and then raises its own counter there: a buffer
  has one for each sending rank;
- *receive* waits until all ranks have raised theirs in the own buffer, and reads that.

Between the two nothing runs for the transfer, so other work of the stream has the whole GPU. A
receiving kernel waits only for *sends*, which wait for nothing: it cannot keep from running what it
waits for, as each rank's kernels run in stream order.

**Why a buffer can be written again, without barriers.** Transfers are numbered, on the device, and
each rank sends number e + 1 only after it has received number e whole (callers see to that order;
`NvlinkBuffer` checks it). There are two buffers and two lines of counters, for even and odd
numbers. Before a rank sends e + 2, it has received e + 1 from *every* rank; each of those had,
before it sent that, received e: read all it wants of e, and seen its counters where e leaves them.
So e + 2 overwrites nothing that is still read, and raises no counter that is still waited on for e:
no counter is ever seen beyond the transfer that is waited for, by anybody. Nothing is said
here about which transfers are dispatches and which are combines: any order does that is the same on
all ranks. A rank without tokens sends and receives all the same.

**Why what is read has arrived.** All threads of a sending program store; they meet (a barrier of
the program); then one adds to the counter with release semantics of the whole system, which covers
what the others have stored, because it has met them. Counters are raised by programs, always by
the same sum per rank and transfer, whatever the number of tokens. Of a receiving program a thread
for each source reads that one's counter with acquire semantics until the sum is there; the program
meets, all sources' threads among it; and only then its threads read. Both buffers and counters are
plain memory of one GPU that its peers have mapped.

**Who came when** is noted where it is wanted (`records`): the first program of a receive writes
down its clock when it saw the first and the last raise of each source. It waits for the same
counters as all others, and what it writes nobody of the exchange reads, so nothing above depends on
it. A source's first and last raise are told by values alone: before a transfer its counter stands
where the one before of that parity has left it, as was said.

**Numbers of transfers** live in two words of device memory. A send reads how many were *received*
and sets how many were *sent*; a receive reads the latter and sets the former. No kernel reads what
it writes itself, so no program sees a number change under its hands, and replays of CUDA graphs
count as eager calls do.

A wait that takes longer than `Window.wait_seconds` ends in a trap: an error of the GPU, not a hang.

Letters: R ranks, T most tokens of a rank, D hidden size, G = D / 128 scales, K experts per token,
L experts of a rank, M rows of each in the masked layout.
"""
