"""Run tasks of MTEB, whose data mteb downloads from the Hugging Face hub. Same as `angle-llm eval mteb`.

python eval/mteb_tasks.py --model DIR --tasks STSBenchmark SICK-R
python eval/mteb_tasks.py --model DIR --tasks NFCorpus --prompts Retrieval-query query.yaml Retrieval-document plain
python eval/mteb_tasks.py --model DIR --tasks Banking77Classification --name me/my-model --output mteb_results

Needs mteb: pip install 'angle_llm[mteb]'.
"""

import sys

from angle_llm.cli import run, run_cli

if __name__ == "__main__":
    run_cli(run, ["eval", "mteb", *sys.argv[1:]])
