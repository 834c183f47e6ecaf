# Added to shtab's script for bash: completion of argument values, and of ./launch.sh.
_bertrain_file() { compgen -f -- "$1"; }
_bertrain_dir() { compgen -d -- "$1"; }
_bertrain_dir_of_run() { compgen -d -- "$1"; [[ ! -d runs ]] || (cd runs && compgen -d -- "$1"); }
_bertrain_yaml() { compgen -f -X '!*.y*ml' -- "$1"; compgen -d -- "$1"; }
_bertrain_file_of_pretrain() { compgen -W "PRETRAIN" -- "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_finetune() { compgen -W "FINETUNE" -- "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_any() { _bertrain_example "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_job() { compgen -W "pretrain finetune prepare" -- "$1"; _bertrain_file_of_any "$1"; }
_bertrain_example() { compgen -W "PRETRAIN FINETUNE" -- "$1"; }
_bertrain() {
  local commands=help root=${1%/*}
  if [[ $1 == *launch.sh ]]; then
    [[ -d ${root/#\~/$HOME}/finetune ]] || return 0 # another project's launch.sh
    commands+=" bench docs test"
  fi
  # bash splits words at equals signs. Here --grid=x becomes two words and a=b one word, as shtab expects.
  local words=("${COMP_WORDS[@]:0:COMP_CWORD+1}") COMP_WORDS=() COMP_CWORD i
  for ((i = 0; i < ${#words[@]}; i++)); do
    if [[ ${words[i]} != = ]]; then
      COMP_WORDS+=("${words[i]}")
    elif [[ ${words[i - 1]} != --* ]]; then
      ((i += 1))
    elif ((i + 1 == ${#words[@]})); then
      COMP_WORDS+=("")
    fi
  done
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_bertrain
  ((COMP_CWORD > 1)) || COMPREPLY+=($(compgen -W "$commands" -- "$2"))
}
complete -o bashdefault -o default -F _bertrain bertrain launch.sh
