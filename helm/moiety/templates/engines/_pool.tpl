{{/* Parts of a pool's pods. Each takes (list root pool). */}}

{{- define "moiety.modelVolume" -}}
{{- $model := (index . 1).model -}}
{{- if $model.claim }}
- name: model
  persistentVolumeClaim: {claimName: {{ $model.claim }}, readOnly: true}
{{- else if $model.image }}
- name: model
  image: {reference: {{ $model.image | quote }}, pullPolicy: IfNotPresent}
{{- else if and $model.hub (not $model.hubCacheSize) }}
- name: hub
  emptyDir: {}
{{- end }}
{{- end -}}

{{- define "moiety.modelMount" -}}
{{- $model := (index . 1).model -}}
{{- if or $model.claim $model.image }}
- {name: model, mountPath: /model, readOnly: true}
{{- else if $model.hub }}
- {name: hub, mountPath: /hub}
{{- end }}
{{- end -}}

{{/* What `--model` says; empty for the demo model. */}}
{{- define "moiety.modelPath" -}}
{{- $model := (index . 1).model -}}
{{- if or $model.claim $model.image -}}
{{- printf "/model/%s" $model.path | trimSuffix "/" -}}
{{- else -}}
{{- $model.hub -}}
{{- end -}}
{{- end -}}

{{- define "moiety.hubVariables" -}}
{{- $model := (index . 1).model -}}
{{- if $model.hub }}
- {name: HF_HOME, value: /hub}
{{- else }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with $model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: token}
{{- end }}
{{- end -}}

{{- define "moiety.poolResources" -}}
{{- $pool := index . 1 -}}
{{- $resources := deepCopy $pool.resources -}}
{{- if $pool.gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $pool.gpuResource (int $pool.gpus))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Of (list pool handler): the probes of an engine. The one at the start waits for `startSeconds`. */}}
{{- define "moiety.poolProbes" -}}
{{- $pool := index . 0 -}}
{{- $probes := $pool.probes -}}
{{- $period := $probes.startup.periodSeconds | default 10 | int -}}
{{- $tries := div (add $pool.startSeconds $period -1) $period -}}
{{- $startup := merge (deepCopy $probes.startup) (dict "failureThreshold" $tries) -}}
{{- include "moiety.probes" (list (merge (dict "startup" $startup) $probes) (index . 1)) -}}
{{- end -}}

{{/* The labels and annotations of a pool's pods, of (list root pool serves). */}}
{{- define "moiety.poolMetadata" -}}
{{- $pool := index . 1 -}}
labels:
  {{- include "moiety.podLabels" (list (index . 0) $pool (printf "engine-%s" $pool.name)) | nindent 2 }}
  moiety.dev/part: engine
  {{- if index . 2 }}
  moiety.dev/serves: "true"
  {{- end }}
{{- with $pool.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of a pool: the update strategy of its StatefulSet. */}}
{{- define "moiety.poolStrategy" -}}
{{- with .updateStrategy }}
updateStrategy:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A list of arguments, one for each option: `true` is a flag, `false` the negative flag. Numbers come as floats, which
would be written as 1e+06. */}}
{{- define "moiety.options" -}}
{{- range $name, $value := (index . 1).options }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
- --{{ $name }}={{ int64 $value }}
{{- else }}
- --{{ $name }}={{ $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "moiety.claims" -}}
{{- $pool := index . 1 -}}
{{- $claims := dict -}}
{{- if and (eq $pool.kind "moiety") $pool.stateSize }}{{ $_ := set $claims "state" $pool.stateSize }}{{ end -}}
{{- if and $pool.model.hub $pool.model.hubCacheSize }}{{ $_ := set $claims "hub" $pool.model.hubCacheSize }}{{ end -}}
{{- if $claims }}
volumeClaimTemplates:
  {{- range $name, $size := $claims }}
  - metadata: {name: {{ $name }}}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $pool.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests: {storage: {{ $size }}}
  {{- end }}
{{- end }}
{{- end -}}
