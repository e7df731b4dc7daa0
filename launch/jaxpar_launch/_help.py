"""The text of `jaxpar-launch --help`: by what one wants to do, then every option."""

HELP = """\
jaxpar-launch [options] script.py [its arguments ...]

Starts a script in several processes on one host or many, watches them, and ends them together.

  Two workers, one CPU device each           jaxpar-launch --nproc-per-node 2 train.py --lr 3e-4
  One worker per GPU                         jaxpar-launch --nproc-per-node gpu train.py
  One worker, four CPU devices               jaxpar-launch --devices-per-proc 4 train.py
  A module, as `python -m` runs it           jaxpar-launch --nproc-per-node 2 -m package.train --lr 3e-4
  Any program                                jaxpar-launch --nproc-per-node 2 --no-python ./run.sh
  Keep every rank's output                   jaxpar-launch --nproc-per-node 2 --log-dir logs train.py
  Show only rank 0, the others in files      jaxpar-launch --nproc-per-node 2 --log-dir logs --redirects 1:3 train.py
  Two hosts: the same line on each           jaxpar-launch --nnodes 2 --rdzv-endpoint node0:29400 --nproc-per-node 4 train.py
  As many hosts as come, two at least        jaxpar-launch --nnodes 2:8 --rdzv-endpoint node0:29400 --max-restarts 3 train.py
  Met at an etcd with TLS and a password     jaxpar-launch --nnodes 2 --rdzv-backend etcd --rdzv-endpoint https://etcd0:2379 \\
                                               --rdzv-conf cacert=ca.pem,user=train,password_file=etcd.txt train.py
  All nodes of a Slurm job                   srun --ntasks-per-node=1 jaxpar-launch --nproc-per-node 4 train.py
  Hosts with places given by hand            jaxpar-launch --nnodes 2 --node-rank 1 --master-addr node0 train.py
  Start again when a worker fails            jaxpar-launch --nproc-per-node 2 --max-restarts 3 train.py
  Start again without compiling anew         jaxpar-launch --nproc-per-node 2 --max-restarts 3 --compilation-cache-dir programs train.py
  Find out where a job hangs, and restart it jaxpar-launch --nproc-per-node 2 --hang-timeout 600 --max-restarts 3 train.py
  Answer a livenessProbe while it runs       jaxpar-launch --nproc-per-node 8 --health-check-port 8080 train.py
  Replace a lost worker, keep the others     jaxpar-launch --nproc-per-node 4 --recover in-place --max-restarts 3 train.py
  Time to write a checkpoint on SIGTERM      jaxpar-launch --nproc-per-node 2 --grace-period 120 train.py
  Do all hosts fit together?                 jaxpar-launch --nnodes 2 --rdzv-endpoint node0:29400 --nproc-per-node 4 --check
  See what would be started                  jaxpar-launch --nproc-per-node 2 --dry-run train.py

In the script, jaxpar.init_process_group(), or plain jax.distributed.initialize() without arguments, joins the
workers; RANK, LOCAL_RANK, WORLD_SIZE and the other variables of torchrun are set. When one worker fails, the
others are ended, the first failure is reported with its rank, exception and last lines, and its exit code (128 + n
for signal n) becomes the launcher's. With --max-restarts all workers start again instead, as often as that: they meet
at a new port and find TORCHELASTIC_RESTART_COUNT one higher. Wrong options exit with 2.

Of several hosts, the one at --rdzv-endpoint serves the meeting; all others may start before or after it. A failure on
one host ends the workers of all, and all start again. With MIN:MAX, hosts may come and leave while the job runs: all
workers start again with the new world, and no restart is used up. If the host that serves is lost, the job ends, unless
etcd keeps the meeting.

workers
  --nproc-per-node N|auto|gpu|cpu   workers on this host; auto: one per GPU, without GPUs one per core  [1]
  --devices-per-proc N              CPU devices, or GPUs, of each worker  [1 CPU device; GPUs in equal shares]
  -m, --module                      the script is a module's name
  --no-python                       the script is a program, started directly
  --run-path                        the script is a Python file, as without it; here for lines from torchrun
  --start-method spawn              how workers start: as new processes, the only way  [spawn]
  --role NAME                       ROLE_NAME of the workers  [default]
hosts
  --nnodes N|MIN:MAX                how many hosts take part  [1]
  --rdzv-endpoint HOST[:PORT]       where their launchers meet; served by the first of them on that host  [port 29400]
  --rdzv-id ID                      keeps jobs apart that meet at one place  [none]
  --rdzv-backend tcp|c10d|static    all the same meeting; names for lines from torchrun  [tcp]
                 etcd               kept by etcd at --rdzv-endpoint HOST:2379[,HOST:2379]: any host may die
                 slurm              nodes, endpoint and id from Slurm; found by itself under srun on several nodes
  --rdzv-conf NAME=S,...            join_timeout 600: for MIN hosts to come; last_call_timeout 30: for more of them;
                                    keep_alive_interval 1, keep_alive_max_attempt 5: a silent launcher is lost after 5 s
                                    for etcd: protocol=https, cacert=FILE of who signed its certificate [the system's]; cert=FILE,
                                    key=FILE this host's own; user=NAME, password_file=FILE [the variable JAXPAR_ETCD_PASSWORD]
  --node-rank N                     this host's place, if it shall be fixed  [by arrival]
  --local-addr HOST                 an address of this host that the others can reach  [that which leads to the endpoint]
where workers meet
  --master-addr HOST                an address of this host; with --nnodes and --node-rank: of the first host  [127.0.0.1]
  --master-port PORT                for JAX's coordination service  [a free one]
  --standalone                      this host alone on a free port: the default, here for lines from torchrun
output (for each worker: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as 0:3,1:2)
  --log-dir DIR                     writes <run>/attempt_<restart>/<local rank>/stdout.log, stderr.log, error.json below DIR, and
                                    <run>/events.jsonl; python -m jaxpar_launch.report DIR [--events] reads them
  -t, --tee WHICH                   to the log files and the console  [3 with --log-dir, else 0]
  -r, --redirects WHICH             to the log files only  [0]
  --local-ranks-filter RANKS        shows these local ranks on the console, as 0,1  [all]
  --log-line-prefix-template TEXT   before each line; ${rank} ${local_rank} ${role_name} ${hostname}  [[rank ${rank}] ]
restarting and stopping
  --max-restarts N                  how often all workers start again when one has failed  [0]
  --recover restart|in-place        in-place: the others keep their processes and memory, and a new worker takes the lost one's
                                    place, if the script calls jaxpar.mesh.run_recoverable; one host, CPU workers  [restart]
  --recover-timeout S               how long they may take to leave the old world before all start again after all  [10]
  --hang-timeout S                  a worker that notes its progress (jaxpar's steps do; jaxpar_launch.heartbeat()) and then
                                    nothing for S seconds hangs: says where each rank is, ends the round  [never]
                                    (with jaxpar_launch.timer.expires(after_s=30): ... does so for a piece of a script, always)
  --health-check-port PORT          GET / answers 200 and how things stand, as JSON; 503 if the launcher is stuck, or the job is
                                    failing  [none]
  --compilation-cache-dir DIR       jaxpar.init_process_group() keeps each worker's compiled programs there, and loads them next
                                    time; trust DIR like code. JAXPAR_COMPILATION_CACHE_MAX_BYTES bounds it  [none; 10 GiB]
  --grace-period S                  after SIGTERM or SIGINT to the launcher: until SIGKILL  [30]
  --failure-grace-period S          after a worker failed: until SIGKILL of the others  [1]
  --monitor-interval S              longest time between two looks at the workers  [0.1]
  --check                           starts no script but a check of all workers: versions, devices, memory, clocks, a sum
  --dry-run                         prints each worker's environment and command; starts nothing
  -h, --help                        this text

On a terminal, local rank 0 writes to it directly, so that progress bars work; the others' lines get a prefix.
Every option can also come from the environment, --log-dir as JAXPAR_LOG_DIR; the command line wins. JAXPAR_RDZV_TOKEN, the
same secret on all hosts, keeps strangers out of the meeting, which else anybody may join who knows the --rdzv-id. Underscores
may stand for dashes. What follows the script's name is the script's.
"""
