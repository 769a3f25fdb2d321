"""The options, examples and help texts of every command, as tables that import nothing heavy.

`ptrain COMMAND --help`, shell completion and the entry points of ranks (`python -m ptrain.train`)
read these tables.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

from ptrain.command_options import (
    ALLOW_IMPORT,
    CODE_OF_RUN,
    DEVICES,
    JSON,
    MODEL,
    OVERRIDES,
    RANKS,
    RUN,
    STEP,
    XRAY,
    Command,
    chart_option,
    flag,
    option,
    value,
)
from ptrain.units import count, part, positive, sequence_length, temperature


def add_arguments(parser: ArgumentParser, verb: str, without: tuple[str, ...] = ()) -> None:
    """Add the arguments and options of a command to a parser.

    Args:
        parser: The parser to extend.
        verb: The command.
        without: Option names to leave out.
    """
    for title, options in COMMANDS[verb].groups.items():
        group = parser.add_argument_group(title)
        for item in options:
            either = isinstance(item, list)
            target = group.add_mutually_exclusive_group() if either else group
            for names, how in item if isinstance(item, list) else (item,):
                if names[0] not in without:
                    target.add_argument(*names, **how)


# fmt: off
COMMANDS = {
    "predict": Command(
        usage=(
            "SPEC [SPEC ...] [key=value ...] [options]",
            "MODEL --cluster NAME [--devices N] [key=value ...]",
        ),
        details="One spec prints all figures, two print the differences, more print a table.",
        groups={
            "Arguments": (
                value("arguments", "SPEC", "Name from `ptrain specs`, or a YAML file. Or a model, "
                    "such as llama3-8b, with --cluster.", nargs="*"),
                OVERRIDES),
            "Job": (
                value("--cluster", "NAME", "Predict for this cluster: a name from `ptrain specs`, "
                    "or a file. Default: from the spec."),
                value("--devices", "N", "Use N devices, for a MODEL or a config of another tool. "
                    "Default: all devices of the cluster.", type=positive),
                MODEL, ALLOW_IMPORT),
            "Figures": (
                flag("--reserved", "Add the memory that the CUDA allocator would reserve. "
                    "Simulates one rank of each spec, which takes seconds and needs torch."),
                flag("--explain", "Add the paper's figures, why they differ, and the theorems."),
                value("--sort", "FIGURE", "Sort rows by this figure, ascending. One of states, "
                    "peak, sent, calls, time. Default: the order of the command line.",
                    choices=("states", "peak", "sent", "calls", "time")),
            ),
            "Output": (
                JSON,
                flag("--csv", "Print one comma-separated line per spec and nothing else."),
                chart_option("Draw the peaks and the device memory."),
                chart_option("Draw the operations of one step over time.", "--timeline"),
            ),
        },
        examples=(
            "ptrain predict 8b-zero3",
            "ptrain predict llama3-8b --cluster h100-8 --devices 8",
            "ptrain predict 8b-ddp 8b-zero3 activations=M",
            "ptrain predict 8b-zero3 mesh.dp_shard=8,16,32 --sort time",
        ),
        topics=("predict", "time", "unknown-peaks"),
    ),
    "select": Command(
        usage=(
            "MODEL --cluster NAME [key=value ...] [options]",
            "SPEC [key=value ...] [options]",
        ),
        details="With a SPEC, `auto` and unset keys are searched; all other keys stay as written.",
        groups={
            "Arguments": (
                value("arguments", "MODEL", "Model from `ptrain specs`, a YAML file with its "
                    "fields, or a SPEC.", nargs="*"),
                OVERRIDES),
            "Job": (
                value("--cluster", "NAME", "Search placements for this cluster: a name from "
                    "`ptrain specs`, or a file. Default: from the SPEC."),
                value("--devices", "N", "Use N devices. Default: all devices of the cluster.",
                    type=positive),
                MODEL, ALLOW_IMPORT),
            "Search": (
                value("--objective", "GOAL", "Minimize this figure. One of time, memory, devices, "
                    "cost. Default: time.", choices=("time", "memory", "devices", "cost"),
                    default="time"),
                option("--where", "--constraint", metavar="COND", action="append", default=[],
                    help="Keep only placements that meet this condition: tp<=8, micro>=2, "
                    "recompute=none, memory<=70 GB. Repeatable. Default: none."),
                value("--tokens", "T", "Plan a training of T tokens, such as 1T. Default: none."),
                value("--deadline", "TIME", "With --objective devices: use the fewest devices that "
                    "finish within this time, such as 30d. Default: none."),
                value("--budget", "MONEY", "With --objective devices: use the fewest devices that "
                    "stay within this cost, at the cluster's price. Default: none.", type=float),
                value("--margin", "PART", "Leave this part of each device's memory free, such as "
                    "10%%. If nothing does, placements without a margin are ranked. Default: 5%%, "
                    "or 0%% with a condition on memory.", type=part),
                value("--exact", "K", "Predict the best K candidates exactly: two of each mesh, "
                    "schedule, micro-batch and recomputation first, then others. Default: 150, or "
                    "9 if the model must be traced.", type=positive),
                value("--by", "METHOD", "Choose by this method. One of search, algorithm1 (the "
                    "paper's, printed with the search's result). Default: search.",
                    choices=("search", "algorithm1"), default="search"),
                value("--thresholds", "A,B", "Set the thresholds of algorithm1: shares of device "
                    "memory for states and for one layer. Default: 0.7,0.3.", default="0.7,0.3"),
            ),
            "Output": (
                value("--out", "FILE", "Write the best placement as a spec. Default: do not write.",
                    type=Path),
                value("--top", "K", "Show K rows. Default: 10, or all with --json and --csv.",
                    type=positive),
                JSON,
                flag("--csv", "Print the ranking as CSV and nothing else."),
                chart_option("Draw memory and time of all exact candidates."),
            ),
        },
        examples=(
            "ptrain select llama3-8b --cluster h100-8",
            "ptrain select llama3-70b --cluster h100-64 --where 'tp<=8' --out best.yaml",
            "ptrain select llama3-8b --cluster h100-64 --objective devices --tokens 1T "
            "--deadline 90d",
            "ptrain select 8b-zero3 mesh=auto placement=auto",
        ),
        topics=("select", "reading-a-ranking", "limits-of-the-search"),
    ),
    "plan": Command(
        usage=("SPEC [SPEC ...] [key=value ...] [options]",),
        groups={
            "Arguments": (
                value("arguments", "SPEC", "Name from `ptrain specs`, or a YAML file.", nargs="*"),
                OVERRIDES),
            "Options": (
                MODEL, RANKS, ALLOW_IMPORT,
                JSON,
                chart_option("Draw the pipeline schedule and the tokens of each `cp` rank, or "
                    "else the shards of each rank."),
            ),
        },
        examples=("ptrain plan hsdp", "ptrain plan pp-1f1b --chart schedule.svg"),
        topics=("placements", "how-a-spec-is-processed"),
    ),
    "simulate": Command(
        usage=("SPEC [SPEC ...] [key=value ...] [options]",),
        details="The program of `train` runs on fake tensors. It needs torch, and no GPU.",
        groups={
            "Arguments": (
                value("arguments", "SPEC", "Name from `ptrain specs`, or a YAML file.", nargs="*"),
                OVERRIDES),
            "Ranks": (
                value("--rank", "N", "Simulate rank N, or `all-distinct`: one rank of each kind. "
                    "Repeatable. Default: rank 0 and the rank with the highest predicted peak.",
                    action="append", default=[]),
                flag("--rehearse", "Run the rank with real tensors on one device, a GPU if there "
                    "is one, without the other ranks."),
                flag("--every-block", "Run every block. Default: run a few of many equal blocks "
                    "and repeat their figures."),
                MODEL, RANKS, ALLOW_IMPORT),
            "Output": (
                JSON,
                chart_option("Draw memory over the step."),
            ),
        },
        examples=(
            "ptrain simulate 8b-zero3",
            "ptrain simulate 70b-zero3 --rank all-distinct --chart memory.svg",
        ),
        topics=("simulate", "unknown-peaks"),
    ),
    "convert": Command(
        usage=(
            "FILE [--model MODEL] [key=value ...] [options]",
            "SPEC --to TOOL [key=value ...] [options]",
        ),
        details="Each key of the file is accounted for, on standard error.",
        groups={
            "Arguments": (
                value("arguments", "FILE", "Config of DeepSpeed, accelerate, axolotl, torchtitan, "
                    "Lightning or the Trainer, or a script with Megatron-LM's arguments. With "
                    "--to, a SPEC too.", nargs="*"),
                OVERRIDES),
            "Options": (
                value("--to", "TOOL", "Write the config of this tool. One of deepspeed, "
                    "accelerate, axolotl, trainer, torchtitan, megatron, lightning. Default: "
                    "write a spec.", choices=("deepspeed", "accelerate", "axolotl", "trainer",
                    "torchtitan", "megatron", "lightning")),
                MODEL,
                RANKS,
                value("--out", "FILE", "Write to this file. Default: print.", type=Path),
                JSON,
            ),
        },
        examples=(
            "ptrain convert ds_config.json --model llama3-8b --devices 8 --out spec.yaml",
            "ptrain convert 8b-zero3 --to accelerate",
        ),
        topics=("convert-your-config", "other-tools"),
    ),
    "train": Command(
        usage=("[SPEC] [key=value ...] [options]",),
        details="One process per rank starts on this machine, and the run is written to runs/.",
        groups={
            "Arguments": (
                value("words", "SPEC", "Name from `ptrain specs`, or a YAML file. Default: zero3.",
                    nargs="*"),
                OVERRIDES),
            "Run folder": (
                value("--run-dir", "DIR", "Write the run to this folder. Default: a new folder in "
                    "runs/.", type=Path),
                value("--resume", "PATH", "Continue from a run folder or a checkpoint. `auto` "
                    "continues the run in --run-dir if it has a checkpoint. Default: start from "
                    "step 0."),
                flag("--accept-data", "Resume although the training data has changed."),
            ),
            "Launch": (
                value("--device", "KIND", "Train on this kind of device; short for `device=KIND`. "
                    "One of auto, cpu, cuda. Default: from the spec.", choices=DEVICES),
                value("--nnodes", "N", "Train on N nodes. Run the same command on each of them. "
                    "Default: 1.", type=positive, default=1),
                value("--rdzv-endpoint", "HOST:PORT", "Meet the other nodes at this address, "
                    "identical on all nodes. Required if --nnodes is above 1.", default=""),
                value("--rdzv-id", "ID", "Identify the job by this random text of at least 16 "
                    "characters, identical on all nodes. Required if --nnodes is above 1.",
                    default=""),
                value("--max-restarts", "N", "Restart failed ranks up to N times. Default: 0.",
                    type=count, default=0),
                flag("--force", "Train even if the prediction does not fit, or if the ranks belong "
                    "to several nodes."),
                ALLOW_IMPORT),
            "Measurement": (
                value("--measure", "N", "Measure memory and traffic every N steps, in addition to "
                    "one steady step. Default: 0 (never).", type=count, default=0),
                flag("--strict", "Exit with 1 if a measured figure differs from its prediction."),
            ),
            "Output": (
                flag("--quiet", "Print no lines per step."),
                JSON,
                flag("--tensorboard", "Write TensorBoard events, too."),
                chart_option("Draw loss and throughput over the steps, and tokens per expert."),
                option("--prepared", action="store_true", help=SUPPRESS),
            ),
        },
        examples=(
            "ptrain train",
            "ptrain train zero3 mesh.dp_shard=4 train.steps=100",
            "ptrain train job.yaml --run-dir runs/job --resume auto checkpoint.every=500",
            "ptrain train job.yaml --nnodes 2 --rdzv-endpoint node0:29500 --rdzv-id ID --run-"
            "dir DIR",
        ),
        topics=("starting-a-training", "several-nodes", "resuming"),
    ),
    "validate": Command(
        usage=("[SPEC ...] [key=value ...] [options]",),
        details="To check gradients and losses, run `ptrain verify`.",
        groups={
            "Arguments": (
                value("arguments", "SPEC", "Name from `ptrain specs`, or a YAML file. Default: "
                    "zero3.", nargs="*"),
                OVERRIDES),
            "Options": (MODEL, RANKS, ALLOW_IMPORT, JSON),
        },
        examples=("ptrain validate zero1 zero2 zero3", "ptrain validate zero3 mesh.dp_shard=2,4"),
        topics=("reading-a-verdict", "prediction-differs"),
    ),
    "verify": Command(
        usage=("[SPEC ...] [key=value ...] [options]",),
        details="If something differs, the root cause is named.",
        groups={
            "Arguments": (
                value("arguments", "SPEC", "Name from `ptrain specs`, or a YAML file. Or a run "
                    "folder. Default: zero3.", nargs="*"),
                OVERRIDES),
            "Stages": (
                value("--steps", "N", "Train N steps in each trajectory, at least 3. Default: 100.",
                    type=int, default=100),
                [
                    flag("--quick", "Run the checks of single steps only, without trajectories."),
                    option("--full", dest="quick", action="store_false", default=False,
                        help="Run every stage (default)."),
                ],
                flag("--every-collective", "Compare the result of every collective over its "
                    "group."),
            ),
            "Options": (
                ALLOW_IMPORT,
                option("-v", "--verbose", action="store_true",
                    help="Print the checks that hold, too."),
                JSON),
        },
        examples=(
            "ptrain verify zero3",
            "ptrain verify tp-sp --quick",
            "ptrain verify runs/latest",
            "ptrain verify tp-zero3 zero3 --steps 20",
        ),
        topics=("verify", "what-verify-checks", "causes-of-a-mismatch"),
    ),
    "xray": XRAY,
    "report": Command(
        usage=("RUN|SPEC [RUN|SPEC ...] [key=value ...] [options]",),
        details="The page begins with the answer: what failed, the verdict, or whether it fits.\n"
        "It needs no network and no script.",
        groups={
            "Arguments": (
                value("arguments", "RUN|SPEC", "Run folder, such as runs/latest. Or a name from "
                    "`ptrain specs`, or a YAML file.", nargs="*"), OVERRIDES),
            "Options": (
                flag("--simulate", "Add memory over the step and by module. Simulates one rank "
                    "of each, which takes seconds and needs torch."),
                value("--out", "FILE", "Write the page to this file. Default: report.html.",
                    type=Path, default=Path("report.html")),
                ALLOW_IMPORT,
                JSON),
        },
        examples=("ptrain report runs/latest", "ptrain report 8b-ddp 8b-zero3 --out 8b.html"),
        topics=("report", "compare"),
    ),
    "checkpoints": Command(
        usage=("RUN [options]",),
        groups={
            "Arguments": (RUN,),
            "Options": (
                flag("--verify", "Compare every file with its SHA-256. Exit with 1 if one differs. "
                    "Default: compare sizes."),
                JSON),
        },
        examples=("ptrain checkpoints runs/latest", "ptrain checkpoints runs/latest --verify"),
        topics=("checkpoints",),
    ),
    "why-oom": Command(
        usage=("RUN [options]",),
        details="Prints rank, phase and module, live and predicted bytes, and changes that fit.",
        groups={"Arguments": (RUN,), "Options": (ALLOW_IMPORT, JSON)},
        examples=("ptrain why-oom runs/latest", "ptrain why-oom runs/latest --json"),
        topics=("report", "out of memory"),
    ),
    "compare": Command(
        usage=("BASE HEAD [key=value ...] [options]",),
        details="BASE and HEAD are run folders, files that a command printed with --json, or\n"
        "specs, which are predicted.",
        groups={
            "Arguments": (
                value("arguments", "BASE HEAD", "Two run folders, JSON files or specs. Documents "
                    "of one name in a file are joined.", nargs="*"),
                OVERRIDES),
            "Limits": (
                value("--fail-on", "LIMITS", "Exit with 1 if HEAD exceeds a limit: "
                    "peak=1%%,bytes=0,verdict. Also memory, calls, time and loss. Default: no "
                    "limits."),
            ),
            "Output": (
                flag("--markdown", "Print a table for a pull request."),
                flag("--all", "Show rows that are equal, too."),
                JSON),
            "Options": (ALLOW_IMPORT,),
        },
        examples=(
            "ptrain compare zero2 zero3",
            "ptrain compare runs/base runs/head --fail-on peak=1%,verdict",
            "ptrain compare base.json head.json --markdown",
        ),
        topics=("in-a-pull-request", "workflow-for-github"),
    ),
    "doctor": Command(
        usage=("[options]",),
        details="Nothing is trained. Without torch, its parts are left out. The exit code is 1 if\n"
        "a finding is an error.",
        groups={
            "Options": (
                value("--ranks", "N", "Check the limits for N ranks on this machine. Default: one "
                    "per GPU, or 2 on CPUs.", type=positive),
                value("--run-dir", "DIR", "Check the space in this folder. Default: runs.",
                    type=Path, default=Path("runs")),
                value("--port", "N", "Check this port of --rdzv-endpoint. Default: 29500.",
                    type=positive, default=29500),
                JSON,
            ),
        },
        examples=("ptrain doctor", "ptrain doctor --json"),
        topics=("check-the-machine", "checking-a-node"),
    ),
    "selftest": Command(
        usage=("[options]",),
        details="Each spec trains four steps: memory and traffic are compared with the\n"
        "prediction, losses with one device's. GPUs are calibrated, too.",
        groups={
            "Options": (
                value("--ranks", "N", "Use N ranks. Default: one per GPU, or 2 on CPUs. With the "
                    "variable PTRAIN_SHARE_GPUS=1 ranks may share a GPU.", type=positive),
                value("--device", "KIND", "Train on this kind of device. One of auto, cpu, cuda. "
                    "Default: auto.", choices=DEVICES, default="auto"),
                flag("--brief", "Run one spec per kind of placement."),
                value("--out", "FILE", "Write the page to this file. Default: selftest_DATE.md.",
                    type=Path),
            ),
        },
        examples=("ptrain selftest", "ptrain selftest --ranks 2 --device cpu --brief"),
        topics=("checking-a-node", "verify"),
    ),
    "tokenize": Command(
        usage=("TEXT [TEXT ...] --out FILE.npy [options]",),
        groups={
            "Arguments": (
                value("texts", "TEXT", "File: .jsonl and .parquet are read by rows, all others as "
                    "plain text.", nargs="+"),
            ),
            "Tokens": (
                value("--out", "FILE.npy", "Write the tokens to this file. Required.",
                    required=True),
                value("--tokenizer", "FILE", "Use this tokenizer.json, or the folder that holds "
                    "it. Default: one token per byte."),
                value("--field", "NAME", "Read this field of each row. Default: text; with --chat "
                    "messages or conversations."),
                value("--end", "TOKEN", "Append this token to every document. Default: the "
                    "eos_token of tokenizer_config.json."),
            ),
            "Chats": (
                flag("--chat", "Read rows as chats, with the chat template of the tokenizer. Only "
                    "answers are learned."),
                value("--sequence", "N", "Write rows of N tokens. Required with --chat.",
                    type=sequence_length),
                flag("--alone", "Put one chat in each row. Default: as many as fit."),
                value("--separator", "TOKEN", "Append this token to every chat; no chat may "
                    "contain it. Default: a special token that no chat contains."),
            ),
            "Output": (JSON,),
        },
        examples=(
            "ptrain tokenize book.txt --out tokens.npy",
            "ptrain tokenize rows.jsonl --tokenizer weights/llama3-8b --out tokens.npy",
            "ptrain tokenize chats.jsonl --chat --sequence 4096 --tokenizer weights/llama3-8b"
            " --out chats.npy",
        ),
        topics=("your-data", "fine-tuning-on-chats"),
    ),
    "export": Command(
        usage=("RUN --to FOLDER [options]",),
        groups={
            "Arguments": (RUN,),
            "Options": (
                value("--to", "FOLDER", "Write to this folder, which must not exist. Required.",
                    required=True),
                STEP,
                value("--adapters", "FORM", "Write a model with PEFT adapters in this form. One of "
                    "merged (adapters in the layers), alone (only the adapters). Default: write "
                    "all parameters of the model.", choices=("merged", "alone")),
                CODE_OF_RUN,
                JSON),
        },
        examples=("ptrain export runs/latest --to exported",
            "ptrain export runs/lora --adapters merged --to merged"),
        topics=("exporting",),
    ),
    "sample": Command(
        usage=("RUN [PROMPT] [options]", "RUN --score FILE [options]"),
        groups={
            "Arguments": (
                RUN,
                value("prompt", "PROMPT", "Text that the model continues. Default: empty.",
                    nargs="?", default=""),
            ),
            "Generation": (
                value("--tokens", "N", "Generate at most N tokens. Default: 200.", type=positive,
                    default=200),
                value("--samples", "N", "Generate N texts. Default: 1.", type=positive, default=1),
                value("--temperature", "T", "Sample at this temperature, 0 or more. 0 takes the "
                    "most probable token. Default: 0.8.", type=temperature, default=0.8),
                value("--seed", "N", "Seed the random numbers with N. Default: 0.", type=int,
                    default=0),
                flag("--chat", "Send PROMPT as a message of a user, by the chat template."),
            ),
            "Options": (
                value("--score", "FILE", "Score this text: print loss, perplexity and bits per "
                    "byte. Default: generate."),
                STEP,
                value("--tokenizer", "FILE", "Use this tokenizer.json, or the folder that holds "
                    "it. Default: from the run."),
                CODE_OF_RUN,
                JSON),
        },
        examples=("ptrain sample runs/latest 'def main('",
            "ptrain sample runs/latest --score held-out.txt"),
        topics=("sampling",),
    ),
    "specs": Command(
        usage=("[options]", "show NAME [key=value ...] [options]"),
        groups={
            "Arguments": (
                value("words", "show NAME", "Show this spec, model or cluster as YAML. Default: "
                    "list all.", nargs="*"),
                OVERRIDES),
            "Options": (JSON,),
        },
        examples=("ptrain specs", "ptrain specs show zero3 mesh.dp_shard=8 > job.yaml"),
        topics=("writing-a-spec", "keys"),
    ),
    "help": Command(
        usage=("[TOPIC]",),
        groups={"Arguments": (
            value("topic", "TOPIC", "Section, page, key of a spec (optimizer.clip), command, "
                "or any word to look for. Default: list all topics.", nargs="*"),
        )},
        examples=("ptrain help launch", "ptrain help optimizer.clip", "ptrain help out of memory"),
        topics=("glossary",),
    ),
    "calibrate": Command(
        usage=("[CLUSTER] [options]",),
        details="The result is a cluster file, for the key `cluster.preset`.",
        groups={
            "Arguments": (value("cluster", "CLUSTER", "Cluster whose other fields are copied: a "
                "name from `ptrain specs`, or a file. Default: the fields of this machine, as far "
                "as they can be found.", nargs="?"),),
            "Measurement": (
                value("--ranks", "N,N", "Measure with these numbers of ranks at once. Default: "
                    "1,2,4 on CPUs, one per GPU on GPUs.", default=""),
                value("--seconds", "S", "End within S seconds. Less time leaves out the largest "
                    "sizes; more repeats modules and CPU collectives. Default: 100.", type=float,
                    default=100.0),
                value("--device", "KIND", "Measure this kind of device. One of auto, cpu, cuda. "
                    "Default: auto.", choices=DEVICES, default="auto"),
                flag("--brief", "Measure a few sizes only, to try the command."),
                flag("--force", "Measure on a busy machine, and overwrite any file."),
            ),
            "Output": (
                value("--out", "FILE", "Write the cluster to this file. Default: cluster.yaml.",
                    type=Path, default=Path("cluster.yaml")),
                JSON,
                option("--part", type=Path, help=SUPPRESS),
                option("--until", type=float, help=SUPPRESS),
            ),
        },
        examples=("ptrain calibrate --out mine.yaml",
            "ptrain calibrate h100-8 --ranks 8 --out node.yaml"),
        topics=("calibrate", "time"),
    ),
    "schema": Command(
        usage=("[options]",),
        groups={
            "Options": (
                value("--out", "FILE", "Write the schema to FILE. Default: print it.", type=Path),
                flag("--json", "Print JSON (default; every command accepts this option)."),
            ),
        },
        examples=("ptrain schema --out ptrain.schema.json",), topics=("writing-a-spec", "keys"),
    ),
    "cache": Command(
        usage=("[options]",),
        groups={"Options": (flag("--clear", "Delete all cached traces."), JSON)},
        examples=("ptrain cache", "ptrain cache --clear"),
        topics=("unknown-peaks",),
    ),
    "completion": Command(
        usage=("SHELL",),
        details="Commands, options, spec names, keys and their values are completed.",
        groups={"Arguments": (
            value("shell", "SHELL", "Print the script for this shell. One of bash, zsh, fish.",
                choices=("bash", "zsh", "fish")),
        )},
        examples=(
            'eval "$(ptrain completion bash)"',
            'eval "$(ptrain completion zsh)"',
            "ptrain completion fish > ~/.config/fish/completions/ptrain.fish",
        ),
        topics=("shell-completion",),
    ),
}
# fmt: on
