{{/* Names and labels. */}}

{{- define "moiety.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Of (list root component): what selects the pods of a part. */}}
{{- define "moiety.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Of (list root component): the same as text, NAME=VALUE,NAME=VALUE. */}}
{{- define "moiety.selectorText" -}}
{{- $pairs := list -}}
{{- range $name, $value := include "moiety.selector" . | fromYaml }}{{ $pairs = append $pairs (printf "%s=%s" $name $value) }}{{ end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- define "moiety.labels" -}}
{{- $root := index . 0 -}}
{{ include "moiety.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of (list root image): one of our images. */}}
{{- define "moiety.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $path := printf "moiety-%s" $name -}}
{{- if $image.registry }}{{ $path = printf "%s/%s" (trimSuffix "/" $image.registry) $path }}{{ end -}}
{{- with index $image.digests $name -}}
{{- printf "%s@%s" $path . -}}
{{- else -}}
{{- printf "%s:%s" $path ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "moiety.secret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-secrets" (include "moiety.fullname" .)) -}}
{{- end -}}

{{/* The Secret in which the first owner's key is put. */}}
{{- define "moiety.ownerSecret" -}}
{{- printf "%s-owner" (include "moiety.fullname" .) -}}
{{- end -}}

{{/* Of (list root pool): the name of a pool's objects. */}}
{{- define "moiety.pool" -}}
{{- printf "%s-engine-%s" (include "moiety.fullname" (index . 0)) (index . 1).name -}}
{{- end -}}

{{/* Of (list root given): the part of an engine pool, as JSON, with its default resources. */}}
{{- define "moiety.wholePool" -}}
{{- $root := index . 0 -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.podDefaults) (deepCopy $root.Values.enginePoolDefaults) (deepCopy (index . 1)) -}}
{{- $gpus := int $pool.gpus -}}
{{- $requests := dict "cpu" "2" "memory" "4Gi" -}}
{{- $limits := dict "memory" "8Gi" -}}
{{- $shared := "1Gi" -}}
{{- if $gpus -}}
{{- $requests = dict "cpu" (mul 4 $gpus | toString) "memory" (printf "%dGi" (mul 32 $gpus)) -}}
{{- $limits = dict "memory" (printf "%dGi" (mul 64 $gpus)) -}}
{{- $shared = printf "%dGi" (mul 8 $gpus) -}}
{{- end -}}
{{- $_ := set $pool "resources" (mergeOverwrite (dict "requests" $requests "limits" $limits) $pool.resources) -}}
{{- $_ := set $pool "sharedMemory" ($pool.sharedMemory | default $shared) -}}
{{- if eq $pool.kind "vllm" }}{{ $_ := set $pool "image" ($pool.image | default $pool.vllmImage) }}{{ end -}}
{{- include "moiety.withoutNulls" $pool -}}
{{- end -}}

{{/* Of (list root pool): how gateways are told of it. */}}
{{- define "moiety.engineAddress" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $host := printf "%s.%s.svc" (include "moiety.pool" .) $root.Release.Namespace -}}
{{- if eq $pool.kind "vllm" -}}
{{- $folder := printf "/models/%s/%s" $pool.name $pool.model.tokenizerPath | trimSuffix "/" -}}
{{- printf "openai+http://%s:8000/v1?model=%s&kind=vllm&tokenizer=%s&priority=on" $host ($pool.model.name | urlquery) $folder -}}
{{- else -}}
{{- printf "dns+tcp://%s:5757" $host -}}
{{- end -}}
{{- end -}}

{{/* Of (list root schema-is-ours): the first of the two hooks a Job runs as. With the bundled database the store is there
only after the install. */}}
{{- define "moiety.beforeRollout" -}}
{{- if .Values.database.bundled.enabled -}}post-install,pre-upgrade{{- else -}}pre-install,pre-upgrade{{- end -}}
{{- end -}}

{{- define "moiety.objectsClaim" -}}
{{- .Values.objectStore.volume.existingClaim | default (printf "%s-objects" (include "moiety.fullname" .)) -}}
{{- end -}}

{{/* Whether several gateways can have the object store at once. */}}
{{- define "moiety.sharesObjects" -}}
{{- or (ne .Values.objectStore.url "") (eq .Values.objectStore.volume.accessMode "ReadWriteMany") -}}
{{- end -}}
